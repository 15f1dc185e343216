"""A depthwise convolution as one sum: each channel's weighted neighbours, all channels of a place beside each other.

    sum(take(take(pad(x), places), places) * matrix)      x (n, h, w, c), the views (n, h', k_h, w', k_w, c)

It is no matrix product.  The views and the sum are an elementwise group, whose kernel reads neighbouring channels of
each place that the window covers, multiplies in float32, and goes on with the bias and the activation.
"""

import math

import numpy as np
from tvm import relax

from relax_passes.fusion.convolutions.rows import Window, windowed
from relax_passes.ir.bindings import dtype_of, shape_of
from relax_passes.ir.floats import HALVES

op = relax.op
MAX_ELEMENTS = 1 << 31  # of the windows' views, whose places are 32-bit


def pays(n: int, channels: int, weight: tuple[int, ...], windows: list[Window], groups: int) -> bool:
    """Whether each of the channels of n inputs has a kernel of its own and one result."""
    if not weight[:2] == (groups, 1) == (channels, 1):
        return False
    return n * channels * math.prod(window.count * window.kernel for window in windows) < MAX_ELEMENTS


def emit_depthwise(emit, x, weight, bias, windows: list[Window]) -> relax.Expr:
    """The convolution (n, places, c) of x (n, …, c) with a weight (c, 1, …); `bias` (c,) may be None."""
    n, *_, channels = shape_of(x)
    if any((window.before, window.after) != (0, 0) for window in windows):
        widths = [0, 0, *(zeros for window in windows for zeros in (window.before, window.after)), 0, 0]
        x = emit(op.nn.pad(x, widths, pad_value=0.0))
    dtype = dtype_of(x)
    terms = emit(op.multiply(windowed(emit, x, windows), _matrix(emit, weight, windows)))
    if dtype in HALVES:  # the sum is float32, whatever computes it
        terms = emit(op.astype(terms, "float32"))
    total = emit(op.sum(terms, axis=[2 + 2 * i for i in range(len(windows))]))
    if dtype in HALVES:
        total = emit(op.astype(total, dtype))
    total = emit(op.reshape(total, (n, math.prod(window.count for window in windows), channels)))
    return total if bias is None else emit(op.add(total, bias))


def _matrix(emit, weight, windows: list[Window]) -> relax.Expr:
    """The weight with its channels last, (1, k_h, 1, k_w, c): gathered, because a transposition is read where it is."""
    channels, size = shape_of(weight)[0], math.prod(window.kernel for window in windows)
    places = np.arange(size)[:, None] + np.arange(channels) * size
    shape = [n for window in windows for n in (1, window.kernel)]
    flat = emit(op.reshape(weight, (channels * size,)))
    return emit(op.take(flat, relax.const(places.reshape(*shape, channels), "int64"), axis=0, mode="clip"))
