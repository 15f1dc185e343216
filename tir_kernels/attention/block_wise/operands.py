"""The arrays that the CUDA block-wise kernel reads, derived from a BlockSparseMask."""

import numpy as np

from tir_kernels.attention.block_wise.geometry import partial_shape
from tir_kernels.attention.block_wise.work import first_keys, plan_work
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import TILE
from tir_kernels.masks.block_sparse import BlockSparseMask

READ_AHEAD = 4  # list entries that a CTA may read past its last; more than any configuration does


def block_wise_operands(mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU) -> list[np.ndarray]:
    """[work, entries, keep_bits, partials, arrivals], in argument order; never empty.

    work : int32 (CTAs, 8)
        What each CTA does (see `plan_work`); a CTA reads its row by two 16-byte loads.
    entries : int32 (number of listed blocks + READ_AHEAD, 2)
        (first token, row of `keep_bits` or -1 where the block is full) of each listed block, in the lists' order.
        The last rows, (0, -1), are read ahead past the end and never used.
    keep_bits : uint32 (number of partial blocks, block_m / 16, 32 lanes, words)
        The bitmaps in the order of mma accumulators, see `lane_keep_bits`.
    partials : float32 (slots, n8 tiles of v + 1, 2 * block_m, 4), arrivals : uint32 (slots,)
        Workspace, zero at first, for the partial results of split block rows.  The kernel leaves `arrivals` zero
        again, so it can be launched any number of times one after the other, but two launches that share these arrays
        must not run at the same time.
    """
    work, n_slots = plan_work(mask, problem, gpu)
    entries = np.tile(np.array([0, -1], np.int32), (len(mask.load_col_idx) + READ_AHEAD, 1))
    entries[:-READ_AHEAD] = np.stack([first_keys(mask), mask.load_part_idx], axis=1)
    return [work, entries, keep_bits_of(mask), *block_wise_workspace(problem, mask.block_m, max(1, n_slots))]


def keep_bits_of(mask: BlockSparseMask) -> np.ndarray:
    """uint32 (partial blocks or 1, block_m / 16, 32, words): the keep bits of a mask's partial blocks."""
    keep_bits = lane_keep_bits(mask.bitmap, mask.block_m, mask.block_n)
    return keep_bits if len(keep_bits) else np.zeros((1, *keep_bits.shape[1:]), np.uint32)


def block_wise_workspace(problem: AttentionProblem, block_m: int, n_slots: int) -> list[np.ndarray]:
    """[partials, arrivals], float32 and uint32 as above, of shapes (slots, …), for so many slots."""
    partials = np.zeros((n_slots, *partial_shape(problem, block_m)), np.float32)
    return [partials, np.zeros(n_slots, np.uint32)]


def lane_keep_bits(bitmap: np.ndarray, block_m: int, block_n: int) -> np.ndarray:
    """Bitmaps uint64 (n, tiles) regrouped by lane: uint32 (n, block_m / 16, 32, ceil(block_n / 64)).

    In an m16n8 accumulator lane l holds bits 2l and 2l + 1 of the upper and of the lower 8×8 tile.  Bit
    4 * (tile column) + 2 * (lower) + (odd column) of the lane's words belongs to the lane's accumulator of the same
    number.  So a warp reads all bits of its rows in one coalesced load and tests them at constant positions.

    Raises MaskError for 2^31 words or more: kernels index them with 32 bits.
    """
    row_tiles, col_tiles = block_m // (2 * TILE), block_n // TILE
    if len(bitmap) * row_tiles * 32 * -(-col_tiles // 8) >= 2**31:
        blocks = f"{len(bitmap)} partial blocks of {block_m}x{block_n}"
        raise MaskError(f"the keep bits of {blocks} are 2^31 words or more; indices are 32-bit")
    tiles = bitmap.reshape(len(bitmap), col_tiles, row_tiles, 2, 1)
    pairs = (tiles >> (2 * np.arange(32, dtype=np.uint64))) & np.uint64(3)  # (n, column, row tile, lower, lane)
    shift = (4 * (np.arange(col_tiles) % 8)[:, None] + 2 * np.arange(2)).astype(np.uint64)
    bits = (pairs << shift[:, None, :, None]).sum(axis=3, dtype=np.uint64)  # (n, column, row tile, lane)
    words = np.zeros((len(bitmap), -(-col_tiles // 8), row_tiles, 32), np.uint32)
    for w in range(words.shape[1]):
        words[:, w] = bits[:, 8 * w : 8 * w + 8].sum(axis=1, dtype=np.uint64).astype(np.uint32)
    return np.ascontiguousarray(words.transpose(0, 2, 3, 1))
