"""How many blocks a mask lists at every block size, counted from its storage at the finest one."""

from dataclasses import dataclass

import numpy as np

from tir_kernels.masks.block_sparse import BlockSparseMask

FINEST = (16, 32)  # rows and columns of the blocks that all others are made of


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """Counts of the blocks that `BlockSparseMask` would list at one block size.

    Attributes
    ----------
    load : int (n_patterns, n_block_rows)
        Listed blocks of each block row.
    part : int (n_patterns,)
        Partial blocks.
    strips : int (n_patterns,)
        Strips of `FINEST[0]` rows, cut from partial blocks, that keep something.
    """

    load: np.ndarray
    part: np.ndarray
    strips: np.ndarray


class FineMask:
    """A mask at the `FINEST` block size; it counts blocks whose sizes are `FINEST` times 2, 4, 8 …, or 3 times these.

    With a token stride, only blocks of the same class of tokens are merged (tir_kernels/masks/token_blocks.py).
    """

    def __init__(self, mask: BlockSparseMask):
        assert (mask.block_m, mask.block_n) == FINEST
        self.mask = mask
        self.finest = tuple(
            self._grid(row_ptr, columns)
            for row_ptr, columns in ((mask.load_row_ptr, mask.load_col_idx), (mask.full_row_ptr, mask.full_col_idx))
        )
        self._known, self._counts = {}, {}

    def counts(self, block_m: int, block_n: int) -> BlockCounts:
        """The counts for blocks of block_m × block_n, which are `FINEST` times 2^n or 3 · 2^n."""
        key = block_m, block_n
        if key not in self._counts:
            listed, full, strips = (_in_rows(x) for x in (*self._states(*key), self._states(FINEST[0], block_n)[0]))
            n_full = full.sum(axis=1)
            part, strips = listed.sum(axis=1) - n_full, strips.sum(axis=1) - n_full * (block_m // FINEST[0])
            self._counts[key] = BlockCounts(listed, part, strips)
        return self._counts[key]

    def _states(self, block_m, block_n):
        """Blocks that keep something, and those that keep everything: boolean (patterns, class, row, class, column)."""
        key = block_m, block_n
        if key not in self._known:
            if block_m > FINEST[0]:
                n = _factor(block_m // FINEST[0])
                finer, axis = self._states(block_m // n, block_n), 2
            elif block_n > FINEST[1]:
                n = _factor(block_n // FINEST[1])
                finer, axis = self._states(block_m, block_n // n), 4
            else:
                return self.finest
            combine = _in_pairs if n == 2 else _in_triples
            self._known[key] = combine(finer[0], axis, np.logical_or), combine(finer[1], axis, np.logical_and)
        return self._known[key]

    def _grid(self, row_ptr, columns) -> np.ndarray:
        mask = self.mask
        row_starts = np.arange(len(row_ptr) - 1) * mask.n_block_cols
        grid = np.zeros(len(row_starts) * mask.n_block_cols, np.bool_)
        grid[np.repeat(row_starts, np.diff(row_ptr)) + columns] = True
        return grid.reshape(
            mask.n_patterns, mask.token_stride, -1, mask.token_stride, mask.n_block_cols // mask.token_stride
        )


def _in_pairs(states: np.ndarray, axis: int, combine) -> np.ndarray:
    """Combine neighbours along an axis; a last block without a neighbour is combined with an empty one."""
    if states.shape[axis] % 2:
        states = np.concatenate([states, np.zeros_like(states.take([0], axis))], axis)
    if axis == states.ndim - 1:  # neighbours in memory: both at once
        pairs = np.ascontiguousarray(states).view(np.uint16)
        return pairs == 0x0101 if combine is np.logical_and else pairs != 0
    first, second = (states[(slice(None),) * axis + (slice(i, None, 2),)] for i in (0, 1))
    return combine(first, second)


def _in_triples(states: np.ndarray, axis: int, combine) -> np.ndarray:
    """As `_in_pairs`, of three neighbours."""
    missing = -states.shape[axis] % 3
    if missing:
        states = np.concatenate([states, np.zeros_like(states.take([0] * missing, axis))], axis)
    first, second, third = (states[(slice(None),) * axis + (slice(i, None, 3),)] for i in range(3))
    return combine(combine(first, second), third)


def _factor(n: int) -> int:
    """3 where n is a multiple of it, else 2."""
    return 2 if n % 3 else 3


def _in_rows(states: np.ndarray) -> np.ndarray:
    """(patterns, block rows): how many blocks of each row are True."""
    bits = np.packbits(states.reshape(len(states), states.shape[1] * states.shape[2], -1), axis=2)
    return np.bitwise_count(bits).sum(axis=2, dtype=np.int64)
