"""How many blocks a mask lists at every block size, counted from its storage at the finest one."""

from dataclasses import dataclass

import numpy as np

from tir_kernels.block_sparse_mask import BlockSparseMask

FINEST = (16, 32)  # rows and columns of the blocks that all others are made of


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """Of the blocks of one size: what `BlockSparseMask` would list.

    Attributes
    ----------
    load : int (n_patterns, n_block_rows)
        Listed blocks of each block row.
    part : int (n_patterns,)
        Part blocks.
    strips : int (n_patterns,)
        Strips of `FINEST[0]` rows of part blocks that keep something.
    """

    load: np.ndarray
    part: np.ndarray
    strips: np.ndarray


class FineMask:
    """A mask at the `FINEST` block size, from which the counts at its multiples by powers of two follow.

    Blocks are merged within the classes of tokens of a token stride (tir_kernels/token_blocks.py).
    """

    def __init__(self, mask: BlockSparseMask):
        assert (mask.block_m, mask.block_n) == FINEST
        self.mask = mask
        self.finest = tuple(
            self._grid(row_ptr, columns)
            for row_ptr, columns in ((mask.load_row_ptr, mask.load_col_idx), (mask.full_row_ptr, mask.full_col_idx))
        )
        self._known = {}

    def counts(self, block_m: int, block_n: int) -> BlockCounts:
        """The counts for blocks of block_m × block_n, which are `FINEST` times powers of two."""
        listed, full = self._states(block_m, block_n)
        strips, _ = self._states(FINEST[0], block_n)
        load = np.count_nonzero(listed, axis=(3, 4)).reshape(len(listed), -1)
        n_full, n_strips = (np.count_nonzero(x, axis=(1, 2, 3, 4)) for x in (full, strips))
        return BlockCounts(load, load.sum(axis=1) - n_full, n_strips - n_full * (block_m // FINEST[0]))

    def _states(self, block_m, block_n):
        """Which blocks keep something, and which everything: boolean (patterns, class, block row, class, column)."""
        key = block_m, block_n
        if key not in self._known:
            if block_m > FINEST[0]:
                finer, axis = self._states(block_m // 2, block_n), 2
            elif block_n > FINEST[1]:
                finer, axis = self._states(block_m, block_n // 2), 4
            else:
                return self.finest
            self._known[key] = _in_pairs(finer[0], axis, np.logical_or), _in_pairs(finer[1], axis, np.logical_and)
        return self._known[key]

    def _grid(self, row_ptr, columns) -> np.ndarray:
        mask = self.mask
        grid = np.zeros((len(row_ptr) - 1, mask.n_block_cols), np.bool_)
        grid[np.repeat(np.arange(len(grid)), np.diff(row_ptr)), columns] = True
        return grid.reshape(
            mask.n_patterns, mask.token_stride, -1, mask.token_stride, mask.n_block_cols // mask.token_stride
        )


def _in_pairs(states: np.ndarray, axis: int, combine) -> np.ndarray:
    """Neighbours along an axis combined; a last one without neighbour is combined with a block that keeps nothing."""
    if states.shape[axis] % 2:
        states = np.concatenate([states, np.zeros_like(states.take([0], axis))], axis)
    first, second = (states[(slice(None),) * axis + (slice(i, None, 2),)] for i in (0, 1))
    return combine(first, second)
