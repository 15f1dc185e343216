"""How many blocks a mask lists at every block size, counted from its finest storage: no mask is compiled to be judged."""

from dataclasses import dataclass
from functools import cache

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
    """A mask at the `FINEST` block size, from which the counts at its multiples by powers of two follow."""

    def __init__(self, mask: BlockSparseMask):
        assert (mask.block_m, mask.block_n) == FINEST
        self.mask = mask
        shape = mask.n_patterns, mask.n_block_rows, mask.n_block_cols
        self.listed = _grid(shape, mask.load_row_ptr, mask.load_col_idx)
        self.full = _grid(shape, mask.full_row_ptr, mask.full_col_idx)
        self.counts = cache(self._counts)
        self._states = cache(self._merged)

    def _counts(self, block_m: int, block_n: int) -> BlockCounts:
        """The counts for blocks of block_m × block_n, which are FINEST times powers of two."""
        listed, full = self._states(block_m, block_n)
        strips, _ = self._states(FINEST[0], block_n)
        load = np.count_nonzero(listed, axis=2)
        n_full = np.count_nonzero(full, axis=(1, 2))
        rows = block_m // FINEST[0]
        return BlockCounts(load, load.sum(axis=1) - n_full, np.count_nonzero(strips, axis=(1, 2)) - n_full * rows)

    def _merged(self, block_m, block_n):
        """Boolean (n_patterns, block rows, block columns): blocks that keep something, and everything."""
        if block_m > FINEST[0]:
            finer = self._states(block_m // 2, block_n)
            upper, lower = ([x[:, i::2] for x in finer] for i in (0, 1))
            return _merge(upper, lower, lambda x: x[:, : lower[0].shape[1]])
        if block_n > FINEST[1]:
            finer = self._states(block_m, block_n // 2)
            left, right = ([x[:, :, i::2] for x in finer] for i in (0, 1))
            return _merge(left, right, lambda x: x[:, :, : right[0].shape[2]])
        return self.listed, self.full


def _merge(first, second, with_second):
    """Listed and full of pairs of blocks; the last of the first may have no second, and is part then."""
    listed, full = first[0].copy(), np.zeros_like(first[1])
    with_second(listed)[...] |= second[0]
    with_second(full)[...] = with_second(first[1]) & second[1]
    return listed, full


def _grid(shape, row_ptr, columns) -> np.ndarray:
    grid = np.zeros((shape[0] * shape[1], shape[2]), np.bool_)
    grid[np.repeat(np.arange(len(grid)), np.diff(row_ptr)), columns] = True
    return grid.reshape(shape)
