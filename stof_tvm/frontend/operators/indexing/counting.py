"""Counting, and places in a sorted order: histc, searchsorted, bucketize."""

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.converters import cast
from stof_tvm.frontend.operators.indexing.reading import gather, reshaped, sizes
from tir_kernels.errors import UnsupportedError

op = relax.op


def histc(context, x, bins=100, low=0, high=0):
    """Elements in each of `bins` equal intervals of [low, high]; the last one holds `high`, too."""
    dtype = context.dtype
    x = reshaped(context, x, [-1])
    if low == high == 0 and 0 not in sizes(x):
        low, high = (context.emit(bound(x)) for bound in (op.min, op.max))
        one = relax.const(1, dtype)
        equal = context.emit(op.equal(low, high))
        low = context.emit(op.where(equal, context.emit(op.subtract(low, one)), low))
        high = context.emit(op.where(equal, context.emit(op.add(high, one)), high))
    else:
        low, high = (low - 1, high + 1) if low == high else (low, high)
        low, high = relax.const(low, dtype), relax.const(high, dtype)
    inside = context.emit(op.logical_and(context.emit(op.greater_equal(x, low)), context.emit(op.less_equal(x, high))))
    scaled = context.emit(op.multiply(context.emit(op.subtract(x, low)), relax.const(bins, dtype)))
    place = context.emit(op.divide(scaled, context.emit(op.subtract(high, low))))
    place = context.emit(op.where(inside, place, relax.const(-1, dtype)))
    place = context.emit(op.minimum(context.emit(op.astype(place, "int64")), relax.const(bins - 1, "int64")))
    # A negative fraction above -1 cannot occur: elements outside are at exactly -1.
    same = context.emit(op.equal(relax.const(np.arange(bins)[:, None], "int64"), place))
    return context.emit(op.astype(context.emit(op.sum(context.emit(op.astype(same, "int32")), 1)), dtype))


def searchsorted(context, boundaries, values, out_int32=False, right=False, side=None, sorter=None):
    """The place of each value by PyTorch's own binary search, so unsorted boundaries and NaN give PyTorch's places."""
    right = right if side is None else side == "right"
    if sorter is not None:
        boundaries = gather(context, boundaries, -1, sorter)
    if not isinstance(values, relax.Expr):
        values = relax.const(values, str(boundaries.ty.dtype))
    dtype = str(np.promote_types(*(_numpy(x) for x in (boundaries, values))))
    boundaries, values = (cast(context, x, dtype) for x in (boundaries, values))
    shape, count = sizes(values), sizes(boundaries)[-1]
    emit, whole = context.emit, lambda n: relax.const(n, "int64")
    first, end = (emit(op.full(shape, whole(n), "int64")) for n in (0, count))
    for _ in range(count.bit_length()):
        middle = emit(op.floor_divide(emit(op.add(first, end)), whole(2)))
        at = emit(op.minimum(middle, whole(max(count - 1, 0))))
        is_row = len(sizes(boundaries)) == 1
        found = emit(op.take(boundaries, at, 0) if is_row else op.gather_elements(boundaries, at, len(shape) - 1))
        is_behind = emit((op.greater if right else op.greater_equal)(found, values))
        is_open = emit(op.less(first, end))
        is_left = emit(op.logical_and(is_open, is_behind))
        is_right = emit(op.logical_and(is_open, emit(op.logical_not(is_behind))))
        end = emit(op.where(is_left, middle, end))
        first = emit(op.where(is_right, emit(op.add(middle, whole(1))), first))
    return emit(op.astype(first, context.dtype))


def bucketize(context, values, boundaries, out_int32=False, right=False):
    return searchsorted(context, boundaries, values, out_int32, right)


def one_hot(context, x, classes=-1):
    if classes == -1:
        raise UnsupportedError("one_hot without num_classes has a shape that depends on the values")
    numbers = relax.const(np.arange(classes), str(x.ty.dtype))
    same = context.emit(op.equal(context.emit(op.expand_dims(x, len(sizes(x)))), numbers))
    return context.emit(op.astype(same, "int64"))


def _numpy(x):
    return "float32" if str(x.ty.dtype) == "bfloat16" else str(x.ty.dtype)


def refused(why):
    def convert(context, *_):
        raise UnsupportedError(f"{context.node.target} {why}")

    return convert


BY_VALUES = refused("has a result whose shape depends on values, which an engine cannot have")

COUNTING_CONVERTERS = {
    "histc.default": histc,
    "searchsorted.Tensor": searchsorted,
    "searchsorted.Scalar": searchsorted,
    "bucketize.Tensor": bucketize,
    "bucketize.Scalar": lambda context, value, *rest: bucketize(context, value, *rest),
    "one_hot.default": one_hot,
    "nonzero.default": BY_VALUES,
    "argwhere.default": BY_VALUES,
    "where.default": BY_VALUES,
    "masked_select.default": BY_VALUES,
    "bincount.default": BY_VALUES,
    "_unique2.default": BY_VALUES,
    "unique_consecutive.default": BY_VALUES,
    "unique_dim.default": BY_VALUES,
    "repeat_interleave.Tensor": BY_VALUES,
}
