"""`build(mesh=…)`: what the ranks of a tensor-parallel engine tell one another, and what its report says."""

import json
import zlib

import torch

from relax_passes.attention.site_names import THE_MODEL
from relax_passes.parallel.placement import Ranks
from relax_passes.parallel.shard_tensors import SHARDED
from stof_tvm.parallel.collectives import all_gather_of, all_reduce_of, exchange_of
from stof_tvm.parallel.mailboxes import PeerMemory, why_no_mailboxes
from stof_tvm.parallel.ranks import Peers
from stof_tvm.site_masks import SiteMasks, sizes_of
from tir_kernels.errors import InputError

BLOCK = (64, 64)  # of the lists by which masks are compared


def ranks_of(peers: Peers | None, is_cuda: bool) -> Ranks | None:
    """What passes are told of the ranks, for one engine; None for one of one process.  All ranks call it together."""
    if peers is None:
        return None
    mailboxes = PeerMemory(peers) if is_cuda and not why_no_mailboxes(peers) else None
    exchange = ""
    if peers.count == 2 and (mailboxes is not None or not is_cuda):
        exchange = exchange_of(peers)
    return Ranks(peers.rank, peers.count, all_reduce_of(peers), all_gather_of(peers), exchange, mailboxes)


def refuse_beside(argument: str, **given) -> None:
    """InputError for arguments of `build` that do not go with `argument`, by name; what is not given is None or False.

    `argument` is "mesh" or "context_parallel".
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise InputError(f"{argument} divides an engine of one shape among ranks: leave {name} out")


def meaning_of(report, site_masks: SiteMasks) -> dict[str, int]:
    """Checksums of what is divided, and of all that the given masks keep, in the heads of other ranks too."""
    digests = []
    for site in report.rewritten:
        batch, heads, q_len, kv_len = sizes = sizes_of(site)
        mask = site_masks.given_for(site.site, sizes, site.first_row)
        digests.append("" if mask is None else mask.compile(q_len, kv_len, BLOCK).digest)
    return {"division": zlib.crc32(repr(report.notes).encode()), "mask": zlib.crc32(repr(digests).encode())}


def notes_of(mod, peers: Peers | None, is_cuda: bool = False) -> tuple[str, ...]:
    """What the report says of the division of a module's operators among ranks."""
    if peers is None:
        return ()
    done = json.loads(str(mod.attrs[SHARDED]))
    sites = done["sites"]
    whole = {site: reason for site, reason in sites.items() if reason}
    lines = [
        f"tensor parallel on {peers.count} ranks: {len(sites) - len(whole)} of {len(sites)} attentions "
        f"by heads, {len(done['products'])} MLPs by columns and rows, {len(done['all_reduces'])} sums over ranks "
        f"({_mebibytes(done['all_reduces']):.3g} MiB a call); everything else is whole on every rank"
    ]
    if is_cuda and done["all_reduces"]:
        why = why_no_mailboxes(peers)
        lines.append(
            f"sums are NCCL's all-reduces, because {why}" if why else "products store in the other GPU's memory"
        )
    kinds: dict[tuple[int, int, int], int] = {}
    for inner, outer, columns in done["products"]:
        kinds[inner, outer, columns] = kinds.get((inner, outer, columns), 0) + 1
    lines += [
        f"each rank computes {inner // peers.count} of the {inner} hidden features of {count} MLP{'s' * (count > 1)}"
        f"{' with gates' * (columns > 1)}, and the ranks add their {outer} results"
        for (inner, outer, columns), count in kinds.items()
    ]
    lines += [
        f"each rank computes {shape[-2] // peers.count} of the {shape[-2]} results of the last product, and receives "
        "the others"
        for shape in done["gathers"]
    ]
    lines += [f"whole on every rank: attention {site or THE_MODEL}, because {why}" for site, why in whole.items()]
    return tuple(lines)


def _mebibytes(sums: list) -> float:
    total = 0
    for shape, dtype in sums:
        size = getattr(torch, dtype).itemsize
        for n in shape:
            size *= n
        total += size
    return total / 2**20
