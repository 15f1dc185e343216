"""Masks given for a range of shapes: at a bucket's lengths they must keep what they keep at shorter ones."""

import numpy as np

from relax_passes.attention.site_names import named
from stof_tvm.masks.mask import Mask
from stof_tvm.site_masks import SiteMasks
from tir_kernels.errors import MaskError

ROWS_AT_ONCE = 256


class RangeMasks(SiteMasks):
    """The `mask=` argument of `build` for a bucket, resolved site by site.

    A mask's pattern at the bucket's lengths is used for calls of shorter ones.  That is right if it is made of places
    alone, and if no row that is real is left without a key that is real.
    """

    def given_for(self, path: str, sizes: tuple[int, int, int, int], first_row: int | None = None):
        """The user's mask for the attention at a path; None where there is none.

        MaskError where it does not fit the sizes, or depends on the lengths.
        """
        known = len(self._made)
        mask = super().given_for(path, sizes, first_row)
        if mask is not None and len(self._made) > known:
            if not mask.has_fixed_places:
                raise MaskError(
                    f"attention {named(path)}: the mask {mask!r} depends on the lengths, or fits only one, so one "
                    "engine cannot serve a range of shapes with it; lazy=True compiles each shape instead"
                )
            if (row := _row_without_keys(mask, *sizes[2:])) is not None:
                raise MaskError(
                    f"attention {named(path)}: the mask {mask!r} keeps no key up to row {row}'s own in that row, which "
                    f"is empty in an input of {row + 1} tokens; lazy=True compiles each shape instead"
                )
        return mask


def _row_without_keys(mask: Mask, q_len: int, kv_len: int) -> int | None:
    """The first row that keeps nothing at a shorter length, None where there is none.

    A row's own key is in every input that has the row; of other lengths of keys only the first one is known to be.
    """
    found = []
    for b in range(mask.batch or 1):
        for h in range(mask.heads or 1):
            pattern = mask.at(b, h).bind(q_len, kv_len)
            rows = np.arange(q_len)
            own = rows if q_len == kv_len else np.zeros(q_len, np.int64)
            empty = rows[~np.broadcast_to(pattern.keep(rows[:, None], own[:, None]), (q_len, 1, 1))[:, 0, 0]]
            if q_len == kv_len:
                empty = [row for chunk in _chunks(empty) for row in chunk[~_keeps_earlier(pattern, chunk)]]
            found += list(empty[:1])
    return int(min(found)) if found else None


def _keeps_earlier(pattern, rows: np.ndarray) -> np.ndarray:
    """Which rows keep a key up to their own."""
    columns = np.arange(rows[-1] + 1)
    kept = np.broadcast_to(pattern.keep(rows[None], columns[None]), (1, len(rows), len(columns)))[0]
    return (kept & (columns <= rows[:, None])).any(1)


def _chunks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE)]
