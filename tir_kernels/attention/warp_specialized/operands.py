"""The arrays that the warp-specialized kernel reads, derived from a BlockSparseMask."""

import numpy as np

from tir_kernels.attention.block_wise.geometry import partial_shape
from tir_kernels.attention.block_wise.operands import lane_keep_bits
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.warp_specialized.work import EVERYTHING, NOTHING, listed_blocks, plan_items
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.leading_rows import with_leading_rows
from tir_kernels.masks.token_blocks import first_tokens

READ_AHEAD = 1  # tiles whose list entries are read past an item's last


def warp_specialized_operands(
    mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU, ctas: int, together: int = 1, leading_rows: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """([items, entries, keep_bits], [partials, arrivals, taken]), in argument order; none is empty.

    The kernel reads all of the first three when it runs: their contents may change between two launches.  Of the first
    block row so many `leading_rows` lie before the first token.

    items : int32 (items, 8)
        Block rows, or parts of them, in the order in which `ctas` CTAs take them; see `Item`.
    entries : int32 (together * (number of listed tiles + READ_AHEAD), 2)
        (first token, row of `keep_bits` or -1 in a tile of full blocks) of each block, in the order of `Listed`.
    keep_bits : uint32 (rows, block_m / 16, 32 lanes, words)
        The bitmaps in the order of mma accumulators, see `lane_keep_bits`, then those of a block that keeps nothing
        and, of tiles of several blocks, of one that keeps all.
    partials : float32 (slots, n8 tiles of v + 1, 2 * block_m, 4), arrivals : uint32 (slots, warpgroups)
        Workspace for the partial results of split block rows.
    taken : uint32 (1,)
        How many items were taken from the list.  The kernel leaves it, and `arrivals`, zero, as it finds them.
    """
    mask = with_leading_rows(mask, leading_rows)
    listed = listed_blocks(mask, together)
    items, n_slots = plan_items(mask, listed, problem, gpu, ctas, mask.block_n * together, leading_rows)
    entries = np.tile(np.array([0, -1], np.int32), (len(listed.part) + READ_AHEAD * together, 1))
    behind_all = -(-mask.kv_len // mask.token_stride) * mask.token_stride  # a position that no class of tokens has
    first_key = np.append(first_tokens(mask.kv_len, mask.block_n, mask.token_stride), behind_all)
    entries[: len(listed.part)] = np.stack([first_key[listed.column], listed.part], axis=1)
    workspace = warp_specialized_workspace(problem, mask.block_m, max(1, n_slots))
    return [items, entries, keep_bits_of(mask, together)], workspace


def keep_bits_of(mask: BlockSparseMask, together: int = 1) -> np.ndarray:
    """uint32 (rows, block_m / 16, 32, words): a mask's keep bits, and those of the blocks that tiles have besides."""
    more = np.zeros((1 if together == 1 else 2, mask.bitmap.shape[1]), np.uint64)
    more[EVERYTHING:] = ~np.uint64(0)
    assert NOTHING == 0
    return lane_keep_bits(np.concatenate([mask.bitmap, more]), mask.block_m, mask.block_n)


def warp_specialized_workspace(problem: AttentionProblem, block_m: int, n_slots: int) -> list[np.ndarray]:
    """[partials, arrivals, taken], float32, uint32, uint32 as above, (slots, …) but the last, for so many slots."""
    partials = np.zeros((n_slots, *partial_shape(problem, block_m)), np.float32)
    return [partials, np.zeros((n_slots, block_m // 64), np.uint32), np.zeros(1, np.uint32)]
