"""A mask as one rank sees it: some of its rows, and some of its columns, laid side by side."""

import hashlib

import numpy as np

from stof_tvm.masks.mask import Mask
from stof_tvm.masks.pattern import Pattern
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import TILE, column_bits
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART

KEPT_AT_ONCE = 1 << 21  # elements that a pattern is asked for where it cannot answer in bits


class Columns:
    """Some tokens of a sequence as columns, ascending, and whether each of them counts.

    Parameters
    ----------
    tokens : int64 (n,)
        The token of each column.
    counts : boolean (n,), optional
        False for a column that is kept for nobody; all count by default.
    """

    def __init__(self, tokens: np.ndarray, counts: np.ndarray | None = None):
        self.tokens = tokens
        self.counts = np.ones(len(tokens), np.bool_) if counts is None else counts
        self.before = np.concatenate([[0], np.cumsum(self.counts)])
        self.digest = hashlib.sha256(tokens.astype("<i8").tobytes() + self.counts.tobytes()).digest()


class Gathered(Mask):
    """Rows and columns of a mask at the lengths (length, length).

    Parameters
    ----------
    mask : Mask
    length : int
        Number of tokens of the whole sequence.
    rows : int64 (n,)
        The token of each row, ascending.
    columns : list of lists of Columns
        By batch entry and head; a side of length 1 is shared by all.
    width : int
        Number of columns.  Where a batch entry and head has fewer, those behind its own keep nothing.
    """

    def __init__(self, mask: Mask, length: int, rows: np.ndarray, columns: list[list[Columns]], width: int):
        self.mask, self.batch, self.heads, self._is_fixed = mask, mask.batch, mask.heads, mask._is_fixed
        self.length, self.rows, self.columns, self.width = length, rows, columns, width
        self._digest = hashlib.sha256(rows.astype("<i8").tobytes()).digest()

    def at(self, b, h):
        row = self.columns[b if len(self.columns) > 1 else 0]
        own = row[h if len(row) > 1 else 0]
        return Gathered(self.mask.at(b, h), self.length, self.rows, [[own]], self.width)

    def bind(self, q_len, kv_len):
        if (q_len, kv_len) != (len(self.rows), self.width):
            raise MaskError(f"{self!r} does not fit (q_len, kv_len) = {(q_len, kv_len)}")
        return _GatheredPattern(self.mask.bind(self.length, self.length), self.rows, self.columns[0][0], self.width)

    @property
    def _parts(self):
        digests = tuple(tuple(each.digest for each in row) for row in self.columns)
        return Gathered, self.mask.identity, self.length, self.width, self._digest, digests

    def __repr__(self):
        return f"{len(self.rows)} rows and {self.width} columns of {self.mask!r} at {self.length}"


class _GatheredPattern(Pattern):
    """Blocks are answered for the interval from their first to their last token: what holds there holds in the block.

    Columns behind the last one stand for it, and count for nobody.
    """

    def __init__(self, whole: Pattern, rows: np.ndarray, columns: Columns, width: int):
        extra = np.full(width - len(columns.tokens), columns.tokens[-1] if len(columns.tokens) else 0)
        self.whole, self.rows, self.columns = whole, rows, np.concatenate([columns.tokens, extra])
        self.counts = np.concatenate([columns.counts, np.zeros(len(extra), np.bool_)])
        self.before = np.concatenate([columns.before, np.full(len(extra), columns.before[-1])])
        self.rows_in_tiles = _in_tiles(rows, np.ones(len(rows), np.bool_))
        self.columns_in_tiles = _in_tiles(columns.tokens, columns.counts)
        in_bits = self.rows_in_tiles and self.columns_in_tiles
        self.elements_at_once = whole.elements_at_once if in_bits else min(whole.elements_at_once, KEPT_AT_ONCE)

    def blocks(self, i0, i1, j0, j1, stride):
        first, last, left, right = self.rows[i0], self.rows[i1], self.columns[j0], self.columns[j1]
        in_order = (last - first == i1 - i0).all() and (right - left == j1 - j0).all()
        state = self.whole.blocks(first, last, left, right, stride if in_order else 1)
        counted = self.before[j1 + 1] - self.before[j0]
        state[:, counted == 0] = EMPTY
        some = state[:, counted < j1 - j0 + 1]
        state[:, counted < j1 - j0 + 1] = np.where(some == FULL, PART, some)
        return state

    def keep(self, i, j):
        return self.whole.keep(self.rows[i], self.columns[j]) & self.counts[j][:, None, :]

    def bits(self, i, j, stride):
        if stride > 1 or not (self.rows_in_tiles and self.columns_in_tiles):
            return super().bits(i, j, stride)
        # Tokens of a tile follow one another, as those that patterns are asked for do.
        bits = self.whole.bits(self.rows[i], self.columns[j], stride)
        counted = column_bits(self.counts[j])
        return bits & np.repeat(counted, i.shape[1] // TILE, axis=1)


def _in_tiles(tokens: np.ndarray, counts: np.ndarray) -> bool:
    """Whether each eight tokens, from the first on, follow one another, or none of them counts."""
    at = np.arange(len(tokens) - 1)
    counted = np.append(np.logical_or.reduceat(counts, np.arange(0, len(counts), TILE)), False)
    return bool(((np.diff(tokens) == 1) | (at % TILE == TILE - 1) | ~counted[at // TILE]).all())
