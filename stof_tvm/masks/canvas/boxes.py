"""Patterns that keep a box around each query: on every axis of a canvas, an interval of coordinates."""

import functools
from collections.abc import Sequence

import numpy as np

from stof_tvm.masks.canvas.words import WordPattern, extremes
from stof_tvm.masks.pattern import BITS_AT_ONCE
from tir_kernels.masks.bitmap import TILE
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART

LARGEST_TABLE = 1 << 28  # bits


class Interval(WordPattern):
    """Keeps keys whose coordinate on one axis lies in an interval that the query's coordinate gives.

    Parameters
    ----------
    place : int64 (length,)
        The coordinate of each token, the same for queries and keys.
    low, high : int64 (extent,)
        The first and last coordinate that a query at each coordinate keeps.
    step : int
        Only coordinates whose distance from the query's is a multiple of it are kept.
    """

    def __init__(self, place: np.ndarray, low: np.ndarray, high: np.ndarray, step: int = 1):
        self.place, self.low, self.high, self.step = place, low, high, step
        # Bounds for blocks, whose queries lie between two coordinates: what comes from the first on, or up to the last.
        self.low_from, self.high_from = (np.minimum.accumulate(x[::-1])[::-1] for x in (low, high))
        self.low_to, self.high_to = np.maximum.accumulate(low), np.maximum.accumulate(high)
        self._of_columns: tuple = (None, None, None)

    def placed(self, place: np.ndarray) -> "Interval":
        """The pattern of tokens at other coordinates."""
        return Interval(place, self.low, self.high, self.step)

    def blocks(self, i0, i1, j0, j1, stride):
        a0, a1 = (x[:, None] for x in extremes(self.place, i0, i1))
        b0, b1 = self._columns(j0, j1)
        state = np.full((len(i0), len(j0)), PART, np.int8)
        full = (b0 >= self.low_to[a1]) & (b1 <= self.high_from[a0])
        empty = (b1 < self.low_from[a0]) | (b0 > self.high_to[a1])
        if self.step > 1:
            one = (a0 == a1) & (b0 == b1)
            apart = (a0 - b0) % self.step != 0
            full &= one & ~apart
            empty |= one & apart
        state[full] = FULL
        state[empty] = EMPTY
        return state

    def _columns(self, j0, j1):
        """Least and greatest coordinates of blocks of keys, which are the same for all chunks of block rows."""
        first, last, found = self._of_columns
        if first is not j0 or last is not j1:
            found = extremes(self.place, j0, j1)
            self._of_columns = j0, j1, found
        return found

    def keep(self, i, j):
        a, b = self.place[i][:, :, None], self.place[j][:, None, :]
        kept = (b >= self.low[a]) & (b <= self.high[a])
        return kept & ((a - b) % self.step == 0) if self.step > 1 else kept

    def words(self, i, first, width):
        if self.table is None:
            return None
        words = self.table.view(f"<u{width // TILE}")
        return words[self.place[i], (first // width)[:, None]].astype(np.uint64, copy=False)

    @functools.cached_property
    def table(self) -> np.ndarray | None:
        """uint8 (extent, octets of columns): what a query at each coordinate keeps; None if that were too large."""
        columns = np.pad(self.place, (0, -len(self.place) % 64), mode="edge")
        if len(self.low) * len(columns) > LARGEST_TABLE:
            return None
        table = np.empty((len(self.low), len(columns) // TILE), np.uint8)
        for a in range(len(self.low)):
            kept = (columns >= self.low[a]) & (columns <= self.high[a])
            if self.step > 1:
                kept &= (columns - a) % self.step == 0
            table[a] = np.packbits(kept, bitorder="little")
        return table


class Box(WordPattern):
    """Keeps what the intervals on all axes keep."""

    elements_at_once = BITS_AT_ONCE

    def __init__(self, axes: Sequence[Interval]):
        self.axes = axes

    def blocks(self, *bounds):
        return functools.reduce(np.minimum, (axis.blocks(*bounds) for axis in self.axes))

    def keep(self, i, j):
        return functools.reduce(np.bitwise_and, (axis.keep(i, j) for axis in self.axes))

    def words(self, i, first, width):
        words = [axis.words(i, first, width) for axis in self.axes]
        return None if any(word is None for word in words) else functools.reduce(np.bitwise_and, words)
