"""A mask with rows before its first: its blocks begin elsewhere, and fewer rows of the last ones are past the end."""

import numpy as np

from tir_kernels.masks.bitmap import TILE, count_bits
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART, BlockLists, BlockSparseMask, block_state

EVERYTHING = ~np.uint64(0)  # a tile that keeps all


def with_leading_rows(mask: BlockSparseMask, rows: int) -> BlockSparseMask:
    """The mask with so many rows before its others, in as many block rows as before.

    Blocks keep all of these rows where they keep all of their others, so that they are full, and nothing of them
    elsewhere.  `rows` is a multiple of 8, and the mask's last block row has as many past the end.
    """
    if not rows:
        return mask
    assert mask.token_stride == 1 and rows % TILE == 0
    assert rows <= mask.n_block_rows * mask.block_m - mask.q_len
    tiles = mask.bitmap.reshape(len(mask.bitmap), mask.block_n // TILE, mask.block_m // TILE)
    row = np.repeat(np.arange(len(mask.load_row_ptr) - 1), np.diff(mask.load_row_ptr))
    number = row * mask.n_block_cols + mask.load_col_idx  # of each listed block, row by row
    # Each block is cut in two, and its lower piece goes to the top of the block below it: of both, the numbers of the
    # blocks that they go to, and their rows of tiles before and after.
    cut, top = (mask.block_m - rows) // TILE, rows // TILE
    pieces = (number, slice(cut), slice(top, None)), (number + mask.n_block_cols, slice(cut, None), slice(top))
    states = [_states(mask, tiles[:, :, before]) for _, before, _ in pieces]
    blocks = np.unique(np.concatenate([to[state != EMPTY] for (to, *_), state in zip(pieces, states)]))

    full_pieces = np.zeros(len(blocks), np.int64)
    for (to, *_), state in zip(pieces, states):
        full_pieces += np.bincount(np.searchsorted(blocks, to[state == FULL]), minlength=len(blocks))
    row, column = np.divmod(blocks, mask.n_block_cols)
    is_full = full_pieces == np.where(row % mask.n_block_rows == 0, 1, 2)
    part_idx = np.cumsum(~is_full) - 1
    bitmap = np.zeros((int((~is_full).sum()), *tiles.shape[1:]), np.uint64)
    for (to, before, after), state in zip(pieces, states):
        for kind in (FULL, PART):
            listed = np.flatnonzero(state == kind)
            block = np.searchsorted(blocks, to[listed])
            listed, block = listed[~is_full[block]], block[~is_full[block]]
            kept = EVERYTHING if kind == FULL else tiles[mask.load_part_idx[listed], :, before]
            bitmap[part_idx[block], :, after] = kept

    full_count, part_count = (np.bincount(row[x], minlength=len(mask.load_row_ptr) - 1) for x in (is_full, ~is_full))
    words = bitmap.reshape(len(bitmap), mask.bitmap.shape[1])
    lists = BlockLists(full_count, column[is_full], part_count, column[~is_full], words)
    size = mask.block_m, mask.block_n
    return BlockSparseMask.from_lists(mask.q_len + rows, mask.kv_len, size, [lists], mask.head_to_mask)


def _states(mask: BlockSparseMask, tiles: np.ndarray) -> np.ndarray:
    """EMPTY, PART or FULL for a piece of each listed block; those of partial blocks have these tiles."""
    n_tiles = tiles.shape[1] * tiles.shape[2]
    of_part = block_state(count_bits(tiles.reshape(len(tiles), n_tiles)), n_tiles * TILE * TILE)
    return np.append(of_part, FULL)[mask.load_part_idx]  # the last one, -1, is a full block's
