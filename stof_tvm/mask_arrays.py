"""The mask arrays of an engine whose masks may be replaced: made for any mask, and described in a saved engine."""

import base64
import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.replaceable_masks import ReplaceableMask
from relax_passes.attention.site_names import named
from tir_kernels.attention.mask_forms import MaskLike
from tir_kernels.attention.registry import templates_for
from tir_kernels.errors import ArtifactError, MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.report_rows import RewrittenRow, SiteRow
from tir_kernels.target import parse_target
from tir_kernels.template import config_from_json, config_to_json
from tir_kernels.tuning.problem_json import problem_from_json, problem_to_json

REPLACED = "its mask was given later"
ALIGNMENTS = ("top-left", "bottom-right")  # of a causal mask


class MaskArrays:
    """What makes the arrays that an engine's attention kernels read of their masks.

    Parameters
    ----------
    kernels : sequence of ReplaceableMask
        The attention kernels of the program, in its order.
    target : tvm.target.Target or str
        The engine's target.
    """

    def __init__(self, kernels: Sequence[ReplaceableMask], target):
        self.kernels, self.target = tuple(kernels), parse_target(target)

    @property
    def count(self) -> int:
        """How many arrays there are."""
        return sum(kernel.count for kernel in self.kernels)

    def of(
        self, site_mask: Callable[[AttentionSite], MaskLike | None]
    ) -> tuple[list[torch.Tensor], list[tuple[MaskLike | None, BlockSparseMask]]]:
        """(the arrays in the program's order, the mask of each kernel and how it is stored).

        `site_mask` gives an attention's whole mask.  Attentions of the same kernel and mask share arrays.  Raises
        MaskError, which names the attention, for a mask that does not fit or keeps nothing.
        """
        made: dict = {}
        arrays, masks = [], []
        for kernel in self.kernels:
            mask = site_mask(kernel.site)
            key = kernel.template.NAME, kernel.problem, kernel.config, mask
            if key not in made:
                try:
                    stored = kernel.stored(mask)
                except MaskError as error:
                    raise MaskError(f"attention {named(kernel.site.path)}: {error}") from None
                found = kernel.arrays(stored, self.target)
                made[key] = [torch.from_numpy(np.require(x, requirements=["C", "W"])) for x in found], (mask, stored)
            arrays += made[key][0]
            masks.append(made[key][1])
        return arrays, masks

    def to_json(self) -> list[dict]:
        """A description of the kernels, for `from_json`."""
        return [
            {
                "path": kernel.site.path,
                "causal": kernel.site.causal,
                "sizes": list(kernel.site.sizes),
                "first_row": kernel.site.first_row,
                "constant": None if kernel.site.constant is None else _packed(kernel.site.constant),
                "template": kernel.template.NAME,
                "problem": problem_to_json(kernel.problem),
                "config": json.dumps(config_to_json(kernel.config)),
                "first": kernel.first,
                "count": kernel.count,
            }
            for kernel in self.kernels
        ]

    @staticmethod
    def from_json(data: Sequence[dict], target) -> "MaskArrays":
        """The inverse of `to_json`; ArtifactError for data that it did not return."""
        try:
            target = parse_target(target)
            kernels = [_kernel(entry, target) for entry in data]
            following = itertools.accumulate((kernel.count for kernel in kernels), initial=0)
            if any(kernel.count < 1 or kernel.first != first for kernel, first in zip(kernels, following)):
                raise ValueError("the arrays of its kernels do not follow one another")
            return MaskArrays(kernels, target)
        except Exception as error:  # whatever a field of another kind leads to
            raise ArtifactError(f"the saved engine's description of its mask arrays is malformed: {error}") from error


def with_masks(rows: Sequence[SiteRow], masks: Sequence[tuple[MaskLike | None, BlockSparseMask]]) -> list[SiteRow]:
    """The report's rows of the attentions, those of kernels with these masks."""
    remaining = iter(masks)
    return [_with_mask(row, *next(remaining)) if isinstance(row, RewrittenRow) else row for row in rows]


def _with_mask(row: RewrittenRow, mask: MaskLike | None, stored: BlockSparseMask) -> RewrittenRow:
    notes = [note for note in row.notes if note != REPLACED and not note.startswith("no static mask")]
    return dataclasses.replace(
        row,
        mask="none" if mask is None else repr(mask),
        mask_digest=stored.digest,
        density=stored.density,
        block_density=stored.block_density,
        notes=(*notes, REPLACED),
    )


def _kernel(entry: dict, target) -> ReplaceableMask:
    (template,) = templates_for(target, entry["template"])
    problem, config = problem_from_json(entry["problem"]), config_from_json(template, json.loads(entry["config"]))
    batch, heads, q_len, kv_len = (int(n) for n in entry["sizes"])
    if (batch, heads, q_len, kv_len) != (problem.batch, problem.q_heads, problem.mask_rows, problem.kv_len):
        raise ValueError(f"sizes {entry['sizes']} are not those of its problem")
    if config not in template.configs(problem, target) or type(entry["path"]) is not str:
        raise ValueError(f"{entry['config']} is no configuration of its kernel")
    constant = None if entry["constant"] is None else _unpacked(entry["constant"], (batch, heads, q_len, kv_len))
    if entry["causal"] not in ("", *ALIGNMENTS):
        raise ValueError(f"{entry['causal']!r} is no alignment")
    first_row = entry["first_row"]
    if first_row is not None and not (type(first_row) is int and 0 <= first_row <= kv_len - q_len):
        raise ValueError(f"{first_row!r} is no row that {q_len} of {kv_len} begin at")
    site = AttentionSite(entry["path"], entry["causal"], constant, (batch, heads, q_len, kv_len), first_row)
    return ReplaceableMask(site, template, problem, config, int(entry["first"]), int(entry["count"]))


def _packed(array: np.ndarray) -> dict:
    """A boolean array as text."""
    bits = zlib.compress(np.packbits(array).tobytes())
    return {"shape": list(array.shape), "bits": base64.b85encode(bits).decode()}


def _unpacked(data: dict, sizes: tuple[int, ...]) -> np.ndarray:
    shape = tuple(int(n) for n in data["shape"])
    if len(shape) != 4 or any(n not in (1, size) for n, size in zip(shape, sizes)):
        raise ValueError(f"a constant mask of shape {shape} does not fit {sizes}")
    size = math.prod(shape)
    unpacker = zlib.decompressobj()
    octets = unpacker.decompress(base64.b85decode(data["bits"]), -(-size // 8) + 1)  # not more than is needed
    if len(octets) != -(-size // 8):
        raise ValueError(f"a constant mask of shape {shape} does not have {len(octets)} bytes")
    return np.unpackbits(np.frombuffer(octets, np.uint8), count=size).astype(bool).reshape(shape)
