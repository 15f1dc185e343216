"""Patterns that answer for a row of a block at a time, with the bits of 8 to 64 columns in one word."""

import numpy as np

from stof_tvm.masks.pattern import BITS_AT_ONCE, Pattern
from tir_kernels.masks.bitmap import TILE

WIDTHS = (8, 16, 32, 64)  # columns of a block whose bits one integer of NumPy's holds


class WordPattern(Pattern):
    """A pattern with `words(i, first, width)`.

    It gives uint64 (n, a): for row i[n, a] the bits of the columns first[n] … first[n] + width - 1, the lowest bit
    first, where first[n] is a multiple of `width`, which is one of `WIDTHS`; None where it has no such answer.
    """

    elements_at_once = BITS_AT_ONCE

    def words(self, i, first, width: int): ...

    def bits(self, i, j, stride):
        width = j.shape[1]
        if stride > 1 or width not in WIDTHS:
            return self._bits_of_elements(i, j, stride)
        # Each eight columns follow one another, but not always all of a block, nor do they begin at a multiple.
        in_words = (j[:, 0] % width == 0) & (j == np.minimum(j[:, :1] + np.arange(width), j[:, -1:])).all(axis=1)
        if in_words.all():
            return self._bits_of_words(i, j)
        bits = np.empty((len(i), i.shape[1] // TILE * (width // TILE)), np.uint64)
        for some, bits_of in ((in_words, self._bits_of_words), (~in_words, self._bits_of_elements)):
            if some.any():
                bits[some] = bits_of(i[some], j[some], stride)
        return bits

    def _bits_of_words(self, i, j, stride=1):
        (n, rows), width = i.shape, j.shape[1]
        words = self.words(i, j[:, 0], width)
        if words is None:
            return self._bits_of_elements(i, j, stride)
        octets = words.astype(f"<u{width // TILE}").view(np.uint8).reshape(n, rows // TILE, TILE, width // TILE)
        tiles = np.ascontiguousarray(octets.transpose(0, 3, 1, 2)).view("<u8")
        return tiles.reshape(n, -1).astype(np.uint64, copy=False)

    def _bits_of_elements(self, i, j, stride):
        """Some blocks at a time, because `keep` makes whole arrays of their elements."""
        step = max(1, Pattern.elements_at_once // (i.shape[1] * j.shape[1]))
        parts = [
            super(WordPattern, self).bits(i[k : k + step], j[k : k + step], stride) for k in range(0, len(i), step)
        ]
        return np.concatenate(parts)


def extremes(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the greatest of values[first[k]] … values[last[k]] for each k; both are (len(first),)."""
    padded = np.append(values, values[-1])  # reduceat wants the end of the last interval inside
    ends = np.stack([first, last + 1], axis=1).reshape(-1)
    return np.minimum.reduceat(padded, ends)[::2], np.maximum.reduceat(padded, ends)[::2]
