"""Patterns: what a mask keeps at fixed lengths, answered for whole blocks from index intervals or element by element.

A pattern answers two questions and never holds a q_len × kv_len array of its own:

- `blocks(i0, i1, j0, j1, stride)`: int8 (R, C), for the blocks of rows i0[r], i0[r] + stride … i1[r] and columns
  j0[c], j0[c] + stride … j1[c]: EMPTY and FULL are certain, PART means "look at the elements".  Most patterns answer
  for the whole intervals [i0[r], i1[r]] × [j0[c], j1[c]], whatever the stride.
- `keep(i, j)`: the elements (i[n, a], j[n, b]) of n rectangles, boolean, broadcastable to (n, a, b); i and j are
  int64 and ascending along their second axis.

`bits(i, j, stride)` answers the second question for n blocks, as bitmaps (`tir_kernels/masks/bitmap.py`): a and b are
multiples of 8, and each eight tokens are `stride` apart, but for those that repeat the last token of a ragged block,
whose bits may be anything.

EMPTY < PART < FULL, so that & is a minimum, | a maximum and ~ a reflection.
"""

import copy
import math
from abc import ABC, abstractmethod

import numpy as np

from tir_kernels.masks.bitmap import TILE, column_bits, pack_bitmap, row_bits
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART, block_state

BITS_AT_ONCE = 1 << 26  # elements of which only bits are held
ON_DEVICE_AT_ONCE = 1 << 24  # elements of which int64 tensors are held on a GPU


class Pattern(ABC):
    """What patterns have in common.

    `elements_at_once` is how many elements a call of `bits` should be asked for: as many as there is memory for.
    """

    elements_at_once: int = 1 << 19

    @abstractmethod
    def blocks(self, i0, i1, j0, j1, stride): ...

    @abstractmethod
    def keep(self, i, j): ...

    def bits(self, i, j, stride):
        return pack_bitmap(np.broadcast_to(self.keep(i, j), (*i.shape, j.shape[1])))


class Offsets(Pattern):
    """Keeps by the offset j - i alone (windows, diagonals, causality); &, | and ~ give Offsets again."""

    elements_at_once = BITS_AT_ONCE

    def __init__(self, q_len: int, kv_len: int, member):
        """`member` maps int64 offsets, -(q_len - 1) … kv_len - 1, to booleans."""
        self.zero = q_len - 1
        self.member = member(np.arange(-self.zero, kv_len))
        self.before = {}  # prefix sums by stride
        self.tiles = {}  # by stride: the tile whose first element has each offset

    def with_member(self, member: np.ndarray) -> "Offsets":
        other = copy.copy(self)
        other.member, other.before, other.tiles = member, {}, {}
        return other

    def blocks(self, i0, i1, j0, j1, stride):
        # A block's offsets are every stride-th from low to high.
        low = j0 - i1[:, None] + self.zero
        high = j1 - i0[:, None] + self.zero
        if stride not in self.before:
            self.before[stride] = _prefix_sum_by_residue(self.member, stride)
        before = self.before[stride]
        return block_state(before[high + stride] - before[low], (high - low) // stride + 1)

    def keep(self, i, j):
        return self.member[j[:, None, :] - i[:, :, None] + self.zero]

    def bits(self, i, j, stride):
        if stride not in self.tiles:
            self.tiles[stride] = _tiles_by_offset(self.member, stride)
        return self.tiles[stride][j[:, ::TILE, None] - i[:, None, ::TILE] + self.zero].reshape(len(i), -1)


class Rows(Pattern):
    """Keeps whole query rows: `member` is boolean (q_len,)."""

    elements_at_once = BITS_AT_ONCE

    def __init__(self, member: np.ndarray):
        self.member = member
        self.before = _prefix_sum(member)

    def blocks(self, i0, i1, j0, j1, stride):
        state = block_state(self.before[i1 + 1] - self.before[i0], i1 - i0 + 1)
        return np.repeat(state[:, None], len(j0), axis=1)

    def keep(self, i, j):
        return self.member[i][:, :, None]

    def bits(self, i, j, stride):
        return np.tile(row_bits(self.member[i]), (1, j.shape[1] // TILE))


class Columns(Pattern):
    """Keeps whole key columns: `member` is boolean (kv_len,)."""

    elements_at_once = BITS_AT_ONCE

    def __init__(self, member: np.ndarray):
        self.member = member
        self.before = _prefix_sum(member)

    def blocks(self, i0, i1, j0, j1, stride):
        state = block_state(self.before[j1 + 1] - self.before[j0], j1 - j0 + 1)
        return np.repeat(state[None, :], len(i0), axis=0)

    def keep(self, i, j):
        return self.member[j][:, None, :]

    def bits(self, i, j, stride):
        return np.repeat(column_bits(self.member[j]), i.shape[1] // TILE, axis=1)


class EqualNumbers(Pattern):
    """Keeps pairs whose row and column have the same number (of a document or chunk); both arrays ascend."""

    def __init__(self, of_row: np.ndarray, of_column: np.ndarray):
        self.of_row, self.of_column = of_row, of_column

    def blocks(self, i0, i1, j0, j1, stride):
        first_row, last_row = self.of_row[i0][:, None], self.of_row[i1][:, None]
        first_column, last_column = self.of_column[j0], self.of_column[j1]
        meet = (first_row <= last_column) & (first_column <= last_row)
        same = (first_row == last_column) & (first_column == last_row)
        return meet.astype(np.int8) + same

    def keep(self, i, j):
        return self.of_row[i][:, :, None] == self.of_column[j][:, None, :]


class EachDocument(Pattern):
    """Keeps the pairs of one document that a pattern at the document's length keeps: `inside` has each document's."""

    def __init__(self, same: EqualNumbers, inside: list):
        self.same, self.inside = same, inside
        self.starts = np.searchsorted(same.of_row, np.arange(len(inside)))
        self.elements_at_once = min(pattern.elements_at_once for pattern in inside if pattern is not None)

    def blocks(self, i0, i1, j0, j1, stride):
        state = self.same.blocks(i0, i1, j0, j1, stride)
        rows, columns = (
            self._within(i0, i1),
            self._within(j0, j1),
        )  # the document of each block, -1 where it has several
        for number in np.intersect1d(rows[rows >= 0], columns):
            r, c = np.flatnonzero(rows == number), np.flatnonzero(columns == number)
            start, pattern = self.starts[number], self.inside[number]
            state[np.ix_(r, c)] = pattern.blocks(i0[r] - start, i1[r] - start, j0[c] - start, j1[c] - start, stride)
        state[(state == FULL) & ((rows < 0)[:, None] | (columns < 0))] = PART
        return state

    def _within(self, first, last):
        number = self.same.of_row[first]
        return np.where(number == self.same.of_row[last], number, -1)

    def keep(self, i, j):
        kept = np.zeros((len(i), i.shape[1], j.shape[1]), np.bool_)
        of_row, of_column = self.same.of_row[i], self.same.of_row[j]
        for n, (rows, columns) in enumerate(zip(of_row, of_column, strict=True)):
            for number in np.intersect1d(rows, columns):
                r, c = np.flatnonzero(rows == number), np.flatnonzero(columns == number)
                start, pattern = self.starts[number], self.inside[number]
                inner = pattern.keep(i[n, r][None] - start, j[n, c][None] - start)
                kept[n, r[0] : r[-1] + 1, c[0] : c[-1] + 1] = inner[0]
        return kept


class Layout(Pattern):
    """Keeps the cells of a grid of height × width cells that are True in `cells`, boolean (grid rows, grid columns)."""

    def __init__(self, cells: np.ndarray, height: int, width: int):
        self.cells, self.height, self.width = cells, height, width

    def cell(self, r, c):
        """The cells at broadcastable index arrays."""
        return self.cells[r, c]

    def cell_rows(self, first: int, last: int):
        """Grid rows first … last, (last - first + 1, grid columns); one row if all in the grid are the same."""
        last = first if self.cells.strides[0] == 0 else last
        return self.cells[first : last + 1]

    def blocks(self, i0, i1, j0, j1, stride):
        top, bottom, left, right = i0 // self.height, i1 // self.height, j0 // self.width, j1 // self.width
        if (top == bottom).all() and (left == right).all():  # within a cell each
            return np.where(self.cell(top[:, None], left), FULL, EMPTY)
        state = np.empty((len(i0), len(j0)), np.int8)
        for r, (first, last) in enumerate(zip(top, bottom, strict=True)):
            cells = self.cell_rows(first, last)
            some, every = _prefix_sum(cells.any(axis=0)), _prefix_sum(cells.all(axis=0))
            state[r] = some[right + 1] > some[left]
            state[r] += every[right + 1] - every[left] == right - left + 1
        return state

    def keep(self, i, j):
        r, c = i // self.height, j // self.width
        return self.cell(r[:, :, None], c[:, None, :])


class RandomBlocks(Layout):
    """Keeps each cell × cell square with probability `fill`, by a counter-based generator: nothing is stored.

    Whether a cell is kept depends only on (seed, grid row, grid column), so the pattern is the same for every length,
    chunk and block size.
    """

    def __init__(self, kv_len: int, cell: int, fill: float, seed: int):
        self.height = self.width = cell
        self.columns = np.arange(-(-kv_len // cell))
        # A cell is kept where its 53 highest bits, as a fraction, are below `fill`.
        self.below = math.ceil(fill * 2.0**53) << 11
        with np.errstate(over="ignore"):
            self.state = _mix64(np.uint64(seed))

    def cell(self, r, c):
        bits = _mix64(_mix64(self.state + r.astype(np.uint64)) + c.astype(np.uint64))
        return bits <= np.uint64(self.below - 1) if self.below else np.zeros(bits.shape, np.bool_)

    def cell_rows(self, first, last):
        return self.cell(np.arange(first, last + 1)[:, None], self.columns)

    def keep(self, i, j):
        # Draw the few cells that each rectangle touches, then spread them over its elements.
        r, c = i // self.height, j // self.width
        r0, c0 = r[:, :1], c[:, :1]
        rows = r0 + np.arange((r[:, -1:] - r0).max() + 1)
        columns = c0 + np.arange((c[:, -1:] - c0).max() + 1)
        cells = self.cell(rows[:, :, None], columns[:, None, :])
        return cells[np.arange(len(i))[:, None, None], (r - r0)[:, :, None], (c - c0)[:, None, :]]


def intersection(a, b):
    if isinstance(a, Offsets) and isinstance(b, Offsets):
        return a.with_member(a.member & b.member)
    return And(a, b)


def union(a, b):
    if isinstance(a, Offsets) and isinstance(b, Offsets):
        return a.with_member(a.member | b.member)
    return Or(a, b)


def complement(a):
    return a.with_member(~a.member) if isinstance(a, Offsets) else Not(a)


class And(Pattern):
    """Keeps what both patterns keep."""

    def __init__(self, a, b):
        self.a, self.b = a, b
        self.elements_at_once = min(a.elements_at_once, b.elements_at_once)

    def blocks(self, *bounds):
        return np.minimum(self.a.blocks(*bounds), self.b.blocks(*bounds))

    def keep(self, i, j):
        return self.a.keep(i, j) & self.b.keep(i, j)

    def bits(self, i, j, stride):
        return self.a.bits(i, j, stride) & self.b.bits(i, j, stride)


class Or(Pattern):
    """Keeps what either pattern keeps."""

    def __init__(self, a, b):
        self.a, self.b = a, b
        self.elements_at_once = min(a.elements_at_once, b.elements_at_once)

    def blocks(self, *bounds):
        return np.maximum(self.a.blocks(*bounds), self.b.blocks(*bounds))

    def keep(self, i, j):
        return self.a.keep(i, j) | self.b.keep(i, j)

    def bits(self, i, j, stride):
        return self.a.bits(i, j, stride) | self.b.bits(i, j, stride)


class Not(Pattern):
    """Keeps what the pattern does not."""

    def __init__(self, a):
        self.a = a
        self.elements_at_once = a.elements_at_once

    def blocks(self, *bounds):
        return FULL - self.a.blocks(*bounds)

    def keep(self, i, j):
        return ~self.a.keep(i, j)

    def bits(self, i, j, stride):
        return ~self.a.bits(i, j, stride)


class Opaque(Pattern):
    """Base of patterns that know nothing about blocks: every block is looked at."""

    def blocks(self, i0, i1, j0, j1, stride):
        return np.full((len(i0), len(j0)), PART, np.int8)


def is_by_offset(pattern: Pattern) -> bool:
    """Whether a pattern is known to keep by the offset j - i alone."""
    if isinstance(pattern, And | Or):
        return is_by_offset(pattern.a) and is_by_offset(pattern.b)
    if isinstance(pattern, Not):
        return is_by_offset(pattern.a)
    if isinstance(pattern, Rows | Columns):
        return bool((pattern.member == pattern.member[0]).all())
    return isinstance(pattern, Offsets)


def _prefix_sum(member: np.ndarray) -> np.ndarray:
    """int64 (n + 1,): how many of the first k entries are True, for each k."""
    return np.concatenate([[0], np.cumsum(member)])


def _prefix_sum_by_residue(member: np.ndarray, stride: int) -> np.ndarray:
    """int64 (n + stride,): how many of the entries k - stride, k - 2 * stride … are True, for each k."""
    padded = np.zeros((-(-len(member) // stride) + 1, stride), np.int64)
    padded[1:].reshape(-1)[: len(member)] = member
    return np.cumsum(padded, axis=0).reshape(-1)[: len(member) + stride]


def _tiles_by_offset(member: np.ndarray, stride: int) -> np.ndarray:
    """uint64, parallel to `member`: the tile of every stride-th token whose first element has each offset."""
    beyond = (TILE - 1) * stride
    padded = np.pad(member, beyond).astype(np.uint64)
    row = np.zeros(len(padded) - beyond, np.uint64)
    for c in range(TILE):
        row |= padded[c * stride : len(row) + c * stride] << np.uint64(c)
    tile = np.zeros(len(member), np.uint64)
    for r in range(TILE):
        first = beyond - r * stride
        tile |= row[first : first + len(member)] << np.uint64(TILE * r)
    return tile


def _mix64(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), uint64 → uint64, after one step of its counter."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x
