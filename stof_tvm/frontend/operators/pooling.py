"""Pooling with the divisors and limits of PyTorch.

TVM ignores `divisor_override`, divides by another count in windows that `ceil_mode` adds, and loses NaN in max
pooling.
"""

import itertools
import math

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.elementwise.formulas import Formulas
from stof_tvm.frontend.operators.reductions import dtype_of, formulas, shape_of, shaped
from tir_kernels.errors import UnsupportedError

op = relax.op
AVERAGE = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}


def average_pool(dimensions):
    def convert(context, x, kernel, stride=(), padding=0, ceil_mode=False, include_pad=True, divisor=None):
        f = formulas(context, x)
        if not f.is_float:
            raise UnsupportedError(f"its operand of dtype {dtype_of(x)}")
        kernel, padding = _each(kernel, dimensions), _each(padding, dimensions)
        stride = _each(stride, dimensions) if stride else kernel
        sizes, out = shape_of(x)[-dimensions:], context.shape[-dimensions:]
        after = _padding_after(sizes, out, kernel, stride, padding)
        x = _padded(f, f.cast(x, f.dtype), padding, after, 0.0)
        x = context.emit(op.reshape(x, [1] * (dimensions + 2 - len(shape_of(x))) + shape_of(x)))
        mean = shaped(context, context.emit(AVERAGE[dimensions](x, kernel, stride)), context.shape)
        counts = _counts(sizes, out, kernel, stride, padding, include_pad)
        counts = np.full(out, divisor) if divisor else counts
        factors = math.prod(kernel) / counts
        if (factors == 1).all():
            return mean
        return f.multiply(mean, relax.const(factors, f.dtype))

    return convert


def _each(value, dimensions) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * dimensions if len(value) == 1 else value


def _padding_after(sizes, out, kernel, stride, padding):
    """How much the last window of each dimension reaches beyond the end."""
    needed = ((n - 1) * s + k - size - p for size, n, k, s, p in zip(sizes, out, kernel, stride, padding))
    return [max(0, n) for n in needed]


def _padded(f, x, before, after, value):
    """x with its last dimensions padded; parts of `value` are joined, because TVM pads with finite numbers only."""
    rank = len(shape_of(x))
    for axis, *widths in zip(range(rank - len(before), rank), before, after):
        shape = shape_of(x)
        part = lambda n: f.context.emit(op.broadcast_to(f.operand(value), [*shape[:axis], n, *shape[axis + 1 :]]))
        parts = [part(widths[0])] if widths[0] else []
        parts += [x] + ([part(widths[1])] if widths[1] else [])
        x = x if len(parts) == 1 else f.context.emit(op.concat(parts, axis))
    return x


def _counts(sizes, out, kernel, stride, padding, include_pad) -> np.ndarray:
    """How many elements PyTorch counts in each window: beyond the padding it counts none."""
    counts = np.ones([1] * len(out))
    for axis, (size, n, k, s, p) in enumerate(zip(sizes, out, kernel, stride, padding)):
        start = np.arange(n) * s - p
        end = np.minimum(start + k, size + p)
        if not include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        counts = counts * (end - start).reshape([-1 if d == axis else 1 for d in range(len(out))])
    return counts


def max_pool(dimensions, with_indices):
    """The largest of strided slices, one dimension after another; UnsupportedError where indices are used."""

    def convert(context, x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
        if with_indices and any(user.args[1] == 1 for user in context.node.users):
            raise UnsupportedError("the indices of the largest")
        value = context.node.meta["val"]
        shape = list((value[0] if with_indices else value).shape)
        kernel, padding, dilation = (_each(values, dimensions) for values in (kernel, padding, dilation))
        stride = _each(stride, dimensions) if stride else kernel
        f = Formulas(context, dtype_of(x))
        out = shape[-dimensions:]
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
        lowest = -math.inf if f.is_float else int(np.iinfo(f.dtype).min)
        x = _padded(f, x, padding, _padding_after(shape_of(x)[-dimensions:], out, reach, stride, padding), lowest)
        rank = len(shape)
        for axis, k, s, d, n in zip(range(rank - dimensions, rank), kernel, stride, dilation, out):
            windows = (op.strided_slice(x, [axis], [i * d], [i * d + (n - 1) * s + 1], [s]) for i in range(k))
            parts = [context.emit(window) for window in windows]
            x = parts[0]
            for part in parts[1:]:
                x = f.maximum(x, part)
        return relax.Tuple([x, x]) if with_indices else x

    return convert


def adaptive_average(dimensions):
    """The mean of each window, from its start rounded down to its end rounded up; a single window is one mean."""

    def convert(context, x, size):
        f = formulas(context, x)
        x = f.cast(x, f.dtype)
        rank = len(shape_of(x))
        axes, out = range(rank - dimensions, rank), context.shape[-dimensions:]
        if all(n == 1 for n in out):
            return context.emit(op.mean(x, list(axes), True))
        for axis, n in zip(axes, out):
            x = _means(context, x, axis, n)
        return x

    return convert


def _means(context, x, axis, parts):
    size = shape_of(x)[axis]
    if size % parts == 0:
        shape = shape_of(x)
        split = context.emit(op.reshape(x, [*shape[:axis], parts, size // parts, *shape[axis + 1 :]]))
        return context.emit(op.mean(split, axis + 1, False))
    limits = [(i * size // parts, -(-(i + 1) * size // parts)) for i in range(parts)]
    windows = [context.emit(op.strided_slice(x, [axis], [start], [end])) for start, end in limits]
    means = [context.emit(op.mean(window, axis, True)) for window in windows]
    return context.emit(op.concat(means, axis))


POOLING_CONVERTERS = {
    f"{prefix}adaptive_avg_pool{d}d.default": adaptive_average(d)
    for prefix, d in itertools.product(("", "_"), (1, 2, 3))
}
for d in (1, 2, 3):
    POOLING_CONVERTERS[f"avg_pool{d}d.default"] = average_pool(d)
    POOLING_CONVERTERS[f"max_pool{d}d.default"] = max_pool(d, False)
    POOLING_CONVERTERS[f"max_pool{d}d_with_indices.default"] = max_pool(d, True)
