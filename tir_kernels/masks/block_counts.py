"""How many blocks a mask lists at every block size, counted from its storage at the finest one."""

import functools
from dataclasses import dataclass

import numpy as np

from tir_kernels.masks.block_sparse import BlockSparseMask

FINEST = (16, 32)  # rows and columns of the blocks that all others are made of
ALL_BITS = 255
CHUNK = 1 << 24  # blocks of which a byte each is held


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

    def counts(self, block_m: int, block_n: int, leading_rows: int = 0) -> BlockCounts:
        """The counts for blocks of block_m × block_n, which are `FINEST` times 2^n or 3 · 2^n.

        The first block row has so many rows before the mask's, a multiple of `FINEST`'s, as `with_leading_rows` has it.
        """
        key = block_m, block_n, leading_rows
        if key not in self._counts:
            listed, full, strips = (_in_rows(x) for x in (*self._states(*key), self._states(FINEST[0], block_n)[0]))
            n_full = full.sum(axis=1)
            in_full = n_full * (block_m // FINEST[0]) - full[:, 0] * (leading_rows // FINEST[0])
            self._counts[key] = BlockCounts(listed, listed.sum(axis=1) - n_full, strips.sum(axis=1) - in_full)
        return self._counts[key]

    def _states(self, block_m, block_n, leading_rows=0):
        """Blocks that keep something, and those that keep everything: bits (patterns, class, row, class, columns / 8).

        A row's bits begin at the least significant one; those behind its columns are 0, but in leading rows.
        """
        key = block_m, block_n, leading_rows
        if key not in self._known:
            if leading_rows and leading_rows % block_m == 0:
                n, (listed, full) = leading_rows // block_m, self._states(block_m, block_n)
                self._known[key] = _with_first(listed, n, 0), _with_first(full, n, ALL_BITS)
                return self._known[key]
            if block_m > FINEST[0]:
                n = _factor(block_m // FINEST[0])
                finer, merged = self._states(block_m // n, block_n, leading_rows), _rows_merged
            elif block_n > FINEST[1]:
                n = _factor(block_n // FINEST[1])
                finer, merged = self._states(block_m, block_n // n), _columns_merged
            else:
                return self.finest
            self._known[key] = merged(finer[0], n, np.bitwise_or), merged(finer[1], n, np.bitwise_and)
        return self._known[key]

    def _grid(self, row_ptr, columns) -> np.ndarray:
        mask, stride = self.mask, self.mask.token_stride
        rows, width = len(row_ptr) - 1, mask.n_block_cols // stride
        bits = np.empty((rows, stride, -(-width // 8)), np.uint8)
        at_once = max(1, CHUNK // mask.n_block_cols)
        for first in range(0, rows, at_once):
            ends = row_ptr[first : first + at_once + 1]
            some = np.zeros((len(ends) - 1, mask.n_block_cols), np.bool_)
            some[np.repeat(np.arange(len(some)), np.diff(ends)), columns[ends[0] : ends[-1]]] = True
            bits[first : first + at_once] = np.packbits(some.reshape(-1, stride, width), axis=-1, bitorder="little")
        return bits.reshape(mask.n_patterns, stride, -1, stride, bits.shape[-1])


def _with_first(states: np.ndarray, rows: int, bits: int) -> np.ndarray:
    """The states with so many rows before the first of each class, whose bytes are `bits`."""
    return np.pad(states, [(0, 0), (0, 0), (rows, 0), (0, 0), (0, 0)], constant_values=bits)


def _rows_merged(states: np.ndarray, n: int, combine) -> np.ndarray:
    """Combine `n` neighbouring rows; a last row without neighbours is combined with empty ones."""
    missing = -states.shape[2] % n
    if missing:
        states = np.concatenate([states, np.zeros_like(states[:, :, :1]).repeat(missing, 2)], 2)
    return functools.reduce(combine, (states[:, :, i::n] for i in range(n)))


def _columns_merged(states: np.ndarray, n: int, combine) -> np.ndarray:
    """Combine `n` neighbouring columns, 2 or 3; what a last one lacks counts as empty."""
    if n == 2:
        if states.shape[-1] % 2:
            states = np.concatenate([states, np.zeros_like(states[..., :1])], -1)
        return _halves(combine)[np.ascontiguousarray(states).view("<u2")]
    columns = np.unpackbits(states, axis=-1, bitorder="little")
    columns = np.concatenate([columns, np.zeros((*columns.shape[:-1], -columns.shape[-1] % n), np.uint8)], -1)
    return np.packbits(functools.reduce(combine, (columns[..., i::n] for i in range(n))), -1, "little")


@functools.cache
def _halves(combine) -> np.ndarray:
    """uint8 (2^16,): the 8 bits that the pairs of bits of each uint16 are combined to."""
    pairs = np.unpackbits(np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2), axis=-1, bitorder="little")
    return np.packbits(combine(pairs[:, ::2], pairs[:, 1::2]), axis=-1, bitorder="little")[:, 0]


def _factor(n: int) -> int:
    """3 where n is a multiple of it, else 2."""
    return 2 if n % 3 else 3


def _in_rows(states: np.ndarray) -> np.ndarray:
    """(patterns, block rows): how many blocks of each row are set."""
    bits = states.reshape(len(states), states.shape[1] * states.shape[2], -1)
    return np.bitwise_count(bits).sum(axis=2, dtype=np.int64)
