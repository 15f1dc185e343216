"""Masks by distance: all keys, causal, windows and dilated windows."""

import math
import reprlib

import numpy as np

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.flex import is_by_offset
from stof_tvm.masks.mask import And, Leaf, Mask, Not, Or
from stof_tvm.masks.part import Part
from stof_tvm.masks.pattern import Offsets
from tir_kernels.errors import MaskError


def everything() -> Mask:
    """Keeps all pairs: for heads among others that are masked, and where a mask must be given."""

    def bind(q_len, kv_len):
        return Offsets(q_len, kv_len, lambda offset: offset == offset)

    return Leaf(everything, {}, bind, has_fixed_places=True)


def causal(align: str = "top-left") -> Mask:
    """Keeps no key after the query: j <= i.

    `align` says which corner the diagonal starts from where lengths differ: "top-left" (j <= i, as PyTorch's
    `is_causal`) or "bottom-right" (j <= i + kv_len - q_len, the queries being the last ones, as with a KV cache).
    Raises MaskError for another `align`.
    """
    if align not in ("top-left", "bottom-right"):
        raise MaskError(f"align={reprlib.repr(align)} must be 'top-left' or 'bottom-right'")

    def bind(q_len, kv_len):
        last = kv_len - q_len if align == "bottom-right" else 0
        return Offsets(q_len, kv_len, lambda offset: offset <= last)

    return Leaf(causal, {"align": align}, bind, has_fixed_places=align == "top-left")


def sliding_window(window: int, causal: bool = False) -> Mask:
    """Keeps |i - j| <= window: up to `window` keys on either side of the query and the query's own.

    `causal=True` keeps only 0 <= i - j <= window.  Raises MaskError unless `window` is an integer of at least 0.
    """
    window, causal = check_int("window", window), bool(causal)

    def bind(q_len, kv_len):
        last = 0 if causal else window
        return Offsets(q_len, kv_len, lambda offset: (offset >= -window) & (offset <= last))

    return Leaf(sliding_window, {"window": window, "causal": causal}, bind, has_fixed_places=True)


def dilated_window(window: int, dilation: int) -> Mask:
    """Keeps j = i + k * dilation for |k| <= window (Longformer, section 3.1): a window with gaps of dilation - 1.

    `dilation=1` is `sliding_window(window)`.  Raises MaskError unless `window` is an integer of at least 0 and
    `dilation` of at least 1.
    """
    window, dilation = check_int("window", window), check_int("dilation", dilation, least=1)

    def bind(q_len, kv_len):
        reach = window * dilation
        return Offsets(q_len, kv_len, lambda offset: (abs(offset) <= reach) & (offset % dilation == 0))

    return Leaf(dilated_window, {"window": window, "dilation": dilation}, bind, has_fixed_places=True)


def is_by_distance(mask: Mask) -> bool:
    """Whether a mask keeps pairs by j - i alone, in the same way at all lengths that it fits."""
    if isinstance(mask, And | Or):
        return is_by_distance(mask.a) and is_by_distance(mask.b)
    if isinstance(mask, Not):
        return is_by_distance(mask.a)
    if isinstance(mask, Part):
        return is_by_distance(mask.mask)
    return isinstance(mask, Leaf) and mask.constructor in (everything, causal, sliding_window, dilated_window)


def kept_distances(mask: Mask, length: int) -> np.ndarray:
    """bool (2 * length - 1,): what a mask by distance keeps at key - query from 1 - length on."""
    pattern, places = mask.bind(length, length), np.arange(length)
    first_column = pattern.keep(places[None, ::-1], np.zeros((1, 1), np.int64))[0, :, 0]
    first_row = pattern.keep(np.zeros((1, 1), np.int64), places[None])[0, 0]
    column, row = np.broadcast_to(first_column, (length,)), np.broadcast_to(first_row, (length,))
    return np.concatenate([column[:-1], row])


def reach(mask: Mask, length: int) -> tuple[float, float] | None:
    """(how far before, how far behind) its query a key is kept among `length` tokens, infinity for all that way.

    None unless the mask of each batch entry and head is known to go by distance, in the same way at shorter lengths,
    and for one that keeps nothing.
    """
    entries = {mask.at(b, h) for b in range(mask.batch or 1) for h in range(mask.heads or 1)}
    if not all(_goes_by_distance(entry, length) for entry in entries):
        return None
    found = np.flatnonzero(np.any([kept_distances(entry, length) for entry in entries], 0)) - (length - 1)
    if not len(found):
        return None
    left, right = (max(0, int(distance)) for distance in (-found[0], found[-1]))
    return math.inf if left == length - 1 else left, math.inf if right == length - 1 else right


def _goes_by_distance(mask: Mask, length: int) -> bool:
    """As `is_by_distance`, also of functions; these are looked at with `length` tokens."""
    if isinstance(mask, And | Or):
        return _goes_by_distance(mask.a, length) and _goes_by_distance(mask.b, length)
    if isinstance(mask, Not):
        return _goes_by_distance(mask.a, length)
    if isinstance(mask, Part):
        return _goes_by_distance(mask.mask, mask.length)
    return is_by_distance(mask) or is_by_offset(mask, length)
