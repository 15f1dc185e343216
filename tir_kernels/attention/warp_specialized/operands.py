"""The arrays that the warp-specialized kernel reads, derived from a BlockSparseMask."""

import numpy as np

from tir_kernels.attention.block_wise.geometry import partial_shape
from tir_kernels.attention.block_wise.operands import lane_keep_bits
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.warp_specialized.work import listed_blocks, plan_items
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask

READ_AHEAD = 1  # list entries that are read past an item's last


def warp_specialized_operands(
    mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU, ctas: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """([items, entries, keep_bits], [partials, arrivals, taken]), in argument order; none is empty.

    The kernel reads all of the first three when it runs: their contents may change between two launches.

    items : int32 (items, 8)
        Block rows, or parts of them, in the order in which `ctas` CTAs take them; see `Item`.
    entries : int32 (number of listed blocks + READ_AHEAD, 2)
        (first token, row of `keep_bits` or -1 where the block is full) of each block, in the order of `Listed`.
    keep_bits : uint32 (number of partial blocks + 1, block_m / 16, 32 lanes, words)
        The bitmaps in the order of mma accumulators, see `lane_keep_bits`; the last one keeps nothing.
    partials : float32 (slots, n8 tiles of v + 1, 2 * block_m, 4), arrivals : uint32 (slots, warpgroups)
        Workspace for the partial results of split block rows.
    taken : uint32 (1,)
        How many items were taken from the list.  The kernel leaves it, and `arrivals`, zero, as it finds them.
    """
    listed = listed_blocks(mask)
    items, n_slots = plan_items(mask, listed, problem, gpu, ctas)
    entries = np.tile(np.array([0, -1], np.int32), (len(listed.part) + READ_AHEAD, 1))
    entries[:-READ_AHEAD] = np.stack([listed.column * mask.block_n, listed.part], axis=1)
    return [items, entries, keep_bits_of(mask)], warp_specialized_workspace(problem, mask.block_m, max(1, n_slots))


def keep_bits_of(mask: BlockSparseMask) -> np.ndarray:
    """uint32 (partial blocks + 1, block_m / 16, 32, words): a mask's keep bits, and those of a block without any."""
    nothing = np.zeros((1, mask.bitmap.shape[1]), np.uint64)
    return lane_keep_bits(np.concatenate([mask.bitmap, nothing]), mask.block_m, mask.block_n)


def warp_specialized_workspace(problem: AttentionProblem, block_m: int, n_slots: int) -> list[np.ndarray]:
    """[partials, arrivals, taken], float32, uint32, uint32 as above, (slots, …) but the last, for so many slots."""
    partials = np.zeros((n_slots, *partial_shape(problem, block_m)), np.float32)
    return [partials, np.zeros((n_slots, block_m // 64), np.uint32), np.zeros(1, np.uint32)]
