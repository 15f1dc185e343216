"""The pattern of bands between frames of a video, whose widths depend on the distance in time."""

import numpy as np

from stof_tvm.masks.canvas.layout import Layout
from stof_tvm.masks.canvas.words import WordPattern
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART

ALL = np.uint64(2**64 - 1)


class Bands(WordPattern):
    """Keeps places of a frame at most reach[d] from the query's, d being the distance of the frames.

    Parameters
    ----------
    layout : Layout
        (frames, places of a frame), row-major.
    reach : int64 (frames,)
        The greatest distance of places that is kept, by the distance of frames; -1 where nothing is.
    bound : int64 (frames,)
        At least `reach`, and not increasing.
    """

    def __init__(self, layout: Layout, reach: np.ndarray, bound: np.ndarray):
        self.frames, self.size = layout.canvas
        self.frame, self.place = layout.coordinates()
        self.start = layout.text if layout.text_first else 0
        self.reach, self.bound = reach, bound
        # Down to which distance everything from 0 on is reached.
        self.certain = np.minimum.accumulate(reach)

    def blocks(self, i0, i1, j0, j1, stride):
        f0, f1, k0, k1 = (x[:, None] for x in self._ends(i0, i1))
        g0, g1, l0, l1 = self._ends(j0, j1)
        nearest = np.maximum(np.maximum(g0 - f1, f0 - g1), 0)
        furthest = np.maximum(g1 - f0, f1 - g0)
        apart = np.maximum(np.maximum(l0 - k1, k0 - l1), 0)
        state = np.full((len(i0), len(j0)), PART, np.int8)
        exact = nearest == furthest
        most, least = (
            np.where(exact, self.reach[nearest], self.bound[nearest]),
            np.where(exact, self.reach[furthest], self.certain[furthest]),
        )
        state[apart > most] = EMPTY
        state[np.maximum(l1 - k0, k1 - l0) <= least] = FULL
        return state

    def _ends(self, first, last):
        """Frames and places between which the tokens of each block lie."""
        f0, f1 = self.frame[first], self.frame[last]
        one = f0 == f1
        return f0, f1, np.where(one, self.place[first], 0), np.where(one, self.place[last], self.size - 1)

    def keep(self, i, j):
        distance = np.abs(self.frame[i][:, :, None] - self.frame[j][:, None, :])
        return np.abs(self.place[i][:, :, None] - self.place[j][:, None, :]) <= self.reach[distance]

    def words(self, i, first, width):
        frame, place = self.frame[i], self.place[i]
        words = np.zeros(i.shape, np.uint64)
        first_frame = self.frame[first]
        last_frame = self.frame[np.minimum(first + width, len(self.frame)) - 1]
        for step in range(int((last_frame - first_frame).max()) + 1):
            other = np.minimum(first_frame + step, last_frame)[:, None]
            reach = self.reach[np.abs(frame - other)]
            origin = self.start + other * self.size - first[:, None]  # of the frame, counted from the first column
            low = np.maximum(origin + np.maximum(place - reach, 0), 0)
            high = np.minimum(origin + np.minimum(place + reach, self.size - 1), width - 1)
            some = (reach >= 0) & (high >= low)
            low, high = np.where(some, low, 0).astype(np.uint64), np.where(some, high, 0).astype(np.uint64)
            words |= np.where(some, (ALL >> (np.uint64(63) - (high - low))) << low, np.uint64(0))
        return words
