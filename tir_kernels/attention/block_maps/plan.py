"""The plan of a block map: what the attention kernels of GPUs read, listed on the device in every call.

    entries, counts    the blocks of each block row which the static mask and the map keep (compaction.py)
    items              the block rows as work, long ones first (order.py)

Nothing is read back, and every size is that of the mask's own lists, so a captured graph replays with any map.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tir_kernels.attention.block_maps.compaction import compaction
from tir_kernels.attention.block_maps.order import MOST_GROUPS, Limits, Share, order
from tir_kernels.attention.block_maps.places import places_of
from tir_kernels.attention.block_wise.work import heads_per_group
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.template import Plan, Step
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands


class Reader(NamedTuple):
    """How a kernel reads lists and items that are written at run time.

    never_empty : bool
        Whether every row must have a block, if need be one that keeps nothing.
    fields : callable
        The fields of its item for a `Share`, by their numbers.  Equal functions give equal fields.
    unused : int
        The field that is 0 in what is no item.
    ctas : int
        How many CTAs run at once.
    workspace : callable
        Maps a number of slots to the arrays after the keep bits.
    together : int
        Blocks of a tile.  Items and counts are of tiles, which blocks that keep nothing fill (see `compaction`).
    """

    never_empty: bool
    fields: Callable[[Share], dict[int, Any]]
    unused: int
    ctas: int
    workspace: Callable[[int], Sequence[np.ndarray]]
    together: int = 1

    def limits(self, problem: AttentionProblem, rows: int, most: int, gpu: GPU) -> Limits:
        """The numbers for which items are ordered, of `rows` block rows a head of up to `most` blocks."""
        heads = problem.batch * problem.q_heads
        groups = min(MOST_GROUPS, heads // heads_per_group(problem, gpu))
        # A power of two less one, so that masks with rows of other lengths share a kernel.
        return Limits(self.ctas, heads, rows, groups, (1 << most.bit_length()) - 1 if most else 1)

    def ordering(self, block_m: int, block_n: int, limits: Limits) -> Step:
        """The step that makes items of the lists that the steps before it wrote."""
        return Step(
            order(block_m, block_n * self.together, limits, self.fields, self.unused),
            ("places", "counts", "entries"),
            {"items": ((limits.heads * limits.rows + limits.slots + 1, 8), "int32")},
        )


def block_map_plan(
    problem: AttentionProblem, mask: BlockSparseMask, gpu: GPU, reader: Reader, keep_bits: np.ndarray
) -> Plan:
    """The plan for a mask in blocks that divide those of the map; operands are items, entries, `keep_bits`, workspace.

    `keep_bits` is uint32 (rows, block_m / 16, 32, words), as the kernel reads it.  Raises UnsupportedError where lists
    are too long for 32-bit indices.
    """
    most = -(-int((mask.load_row_ptr[1:] - mask.load_row_ptr[:-1]).max()) // reader.together)
    limits = reader.limits(problem, mask.n_block_rows, most, gpu)
    static = places_of(mask, problem, reader.together)
    rows = len(static.places) - 1
    constants = {
        "places": static.places,
        "part_columns": static.part_columns,
        "full_columns": static.full_columns,
    }
    steps = {
        "compaction": Step(
            compaction(problem, mask.block_n, reader.never_empty, reader.together),
            ("block_map", *constants),
            {"entries": ((static.room, 2), "int32"), "counts": ((rows, 2), "int32")},
        ),
        "order": reader.ordering(mask.block_m, mask.block_n, limits),
    }
    return Plan(constants, steps, ("items", "entries"), Operands.of([keep_bits], reader.workspace(limits.slots)))


def with_count(items: np.ndarray) -> np.ndarray:
    """Items, and the row after them that has their number: int32 (items + 1, 8)."""
    return np.concatenate([items, [[len(items), *[0] * (items.shape[1] - 1)]]]).astype(np.int32)


def divides(block_map: BlockMap | None, block_m: int, block_n: int) -> bool:
    """Whether blocks of a kernel lie in one block of the map each, if there is a map."""
    return block_map is None or (block_map.block_m % block_m == 0 and block_map.block_n % block_n == 0)
