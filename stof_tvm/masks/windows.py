"""Masks by distance: causal, windows and dilated windows."""

import reprlib

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.mask import And, Leaf, Mask, Not, Or
from stof_tvm.masks.pattern import Offsets
from tir_kernels.errors import MaskError


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
    """Whether a mask keeps pairs by j - i alone, in the same way at all lengths."""
    if isinstance(mask, And | Or):
        return is_by_distance(mask.a) and is_by_distance(mask.b)
    if isinstance(mask, Not):
        return is_by_distance(mask.a)
    return isinstance(mask, Leaf) and mask.constructor in (causal, sliding_window, dilated_window)
