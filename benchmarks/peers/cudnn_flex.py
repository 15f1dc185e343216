"""The interval attention of cuDNN's front end, in CuTe: a mask is a few ranges of keys for each query.

A plan of the mask is made on the GPU before; it is not part of a call, and cannot be captured with it.
"""

import torch
import torch.nn.functional as F

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.sdpa import example_inputs
from benchmarks.peers.system import Prepared


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """ImportError where the front end or the CUTLASS DSL that it needs is not installed."""
    import cudnn
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    ends = key_ranges(pattern)
    plan = create_mask_plan(ends.repeat(1, 1, case.batch), *arrange(*example_inputs(case, device)))
    return Prepared(
        call=lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan),
        variant=f"cudnn {cudnn.__version__} {ends.shape[1] // 2 + 1} ranges",
        arrange=arrange,
        restore=lambda out: out.transpose(1, 2),
    )


def arrange(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """From (B, H, S, D) to contiguous (B, S, H, D)."""
    return tuple(x.transpose(1, 2).contiguous() for x in tensors)


def key_ranges(pattern: Pattern) -> torch.Tensor:
    """The kept keys of each query as [0, e0), [e1, e2), …: int32 (1, an odd number, q_len), the unused ends kv_len."""
    ends = [_ends(some) for some in pattern.chunks()]
    most = max(some.shape[1] for some in ends)
    padded = [F.pad(some, (0, most - some.shape[1]), value=pattern.kv_len) for some in ends]
    return torch.cat(padded).T[None].contiguous()


def _ends(keep: torch.Tensor) -> torch.Tensor:
    """Where each row changes if kept keys precede it and none follow, int32 (rows, most changes of a row)."""
    changes = F.pad(keep, (1, 0), value=True) != F.pad(keep, (0, 1), value=False)
    counts = changes.sum(dim=1)
    row, key = changes.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=keep.device) - (counts.cumsum(0) - counts)[row]
    ends = torch.full((len(keep), int(counts.max())), keep.shape[1], dtype=torch.int32, device=keep.device)
    ends[row, place] = key.to(torch.int32)
    return ends
