"""Operators that depend on the order of values (sort, topk, argmax, median, …): values and their indices.

NaN is ordered as in PyTorch, whose sorts take NaN for the largest value; TVM compares NaN like any number.
"""

import math

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.elementwise.formulas import Formulas
from stof_tvm.frontend.operators.reductions import at_least_1d, dtype_of, formulas, scan, shape_of, shaped

op = relax.op
WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}


def key(context, x):
    """Numbers without NaN in the order of x: in a wider dtype, NaN becomes inf, and inf the largest finite number."""
    if dtype_of(x) in ("bool", "int8", "uint8", "int16"):  # dtypes that TVM does not sort
        return Formulas(context, "int32").cast(x, "int32")
    if dtype_of(x) not in WIDER:
        return x
    f = Formulas(context, WIDER[dtype_of(x)])
    wide, limit = f.cast(x, f.dtype), float(np.finfo(f.dtype).max)
    return f.where(f.isnan(wide), f.operand(math.inf), f.minimum(wide, limit))


def place(operator):
    """argmax or argmin: the index of the first extreme value, or of the first NaN (as relax_passes legalises them)."""

    def convert(context, x, dim=None, keepdim=False):
        return shaped(context, _place(context, operator, x, dim), context.shape)

    return convert


def _place(context, operator, x, dim):
    x = context.emit(op.reshape(x, [-1])) if dim is None or not x.ty.shape else x
    x = Formulas(context, "int8").cast(x, "int8") if dtype_of(x) == "bool" else x
    return context.emit(operator(x, 0 if dim is None else dim, False))


def extreme_and_place(reduction, operator):
    """max or min along a dimension: values and indices."""

    def convert(context, x, dim, keepdim=False):
        shape = _shape(context)
        numbers = at_least_1d(context, Formulas(context, "int8").cast(x, "int8") if dtype_of(x) == "bool" else x)
        values = shaped(context, context.emit(reduction(numbers, dim, False)), shape)
        return relax.Tuple([values, shaped(context, _place(context, operator, x, dim), shape)])

    return convert


def _shape(context):
    return list(context.node.meta["val"][0].shape)


def argsort(context, x, dim=-1, descending=False):
    order = context.emit(op.argsort(key(context, at_least_1d(context, x)), dim, descending, dtype="int64"))
    return shaped(context, order, context.shape)


def sort(context, x, dim=-1, descending=False):
    x = at_least_1d(context, x)
    order = context.emit(op.argsort(key(context, x), dim, descending, dtype="int64"))
    return _values_at(context, x, order, dim)


def stable_sort(context, x, stable=None, dim=-1, descending=False):
    return sort(context, x, dim, descending)


def topk(context, x, k, dim=-1, largest=True, *_):
    x = at_least_1d(context, x)
    if k == 0:  # which is all of them to TVM
        shape = _shape(context)
        return relax.Tuple([context.emit(op.zeros(shape, dtype)) for dtype in (dtype_of(x), "int64")])
    found = op.topk(key(context, x), k, dim, ret_type="indices", largest=largest, dtype="int64")
    return _values_at(context, x, context.emit(found), dim)


def _values_at(context, x, order, dim):
    """(values, indices) in the shape PyTorch gives them."""
    values = gather(context, x, order, dim)
    return relax.Tuple([shaped(context, value, _shape(context)) for value in (values, order)])


def gather(context, x, indices, dim):
    """gather_elements, with booleans gathered as bytes."""
    dtype = dtype_of(x)
    f = Formulas(context, "int8" if dtype == "bool" else dtype)
    picked = context.emit(op.gather_elements(f.cast(x, f.dtype), indices, dim % len(shape_of(x))))
    return f.cast(picked, dtype)


def kthvalue(context, x, k, dim=-1, keepdim=False):
    x = at_least_1d(context, x)
    order = context.emit(op.argsort(key(context, x), dim, False, dtype="int64"))
    return _values_at(context, x, _picked(context, order, dim, k - 1), dim)


def median(context, x, dim, keepdim=False):
    """The lower of two middle values, the first NaN where there is one."""
    x = at_least_1d(context, x)
    order = context.emit(op.argsort(key(context, x), dim, False, dtype="int64"))
    index = _picked(context, order, dim, (shape_of(x)[dim] - 1) // 2)
    if dtype_of(x) in WIDER:
        f = Formulas(context, "int32")
        missing = f.cast(_isnan(context, x), "int32")
        first = context.emit(op.argmax(missing, dim, True))
        index = f.where(f.greater(context.emit(op.max(missing, dim, True)), 0), first, index)
    return _values_at(context, x, index, dim)


def nanmedian(context, x, dim, keepdim=False):
    x = at_least_1d(context, x)
    if dtype_of(x) not in WIDER:
        return median(context, x, dim, keepdim)
    order = context.emit(op.argsort(key(context, x), dim, False, dtype="int64"))
    f = Formulas(context, "int64")
    count = context.emit(op.sum(f.cast(context.emit(op.logical_not(_isnan(context, x))), "int64"), dim, True))
    middle = f.maximum(f.floor_divide(f.subtract(count, 1), 2), 0)
    return _values_at(context, x, gather(context, order, middle, dim), dim)


def of_all(operator):
    """The converter of median or nanmedian over all values, from the converter along a dimension."""

    def convert(context, x):
        flat = context.emit(op.reshape(x, [-1]))
        return operator(_Flat(context), flat, 0)[0]

    return convert


class _Flat:
    """A context whose result is a pair (value, index) without dimensions, not the value alone."""

    def __init__(self, context):
        self.builder, self.emit = context.builder, context.emit
        self.node = type("Node", (), {"meta": {"val": [context.node.meta["val"]]}})


def _isnan(context, x):
    return Formulas(context, dtype_of(x)).isnan(x)


def _picked(context, order, dim, position):
    return context.emit(op.strided_slice(order, [dim % len(shape_of(order))], [position], [position + 1]))


def cumulative_extreme(is_largest):
    """cummax or cummin: values and indices, that of the last of equal values, of the last NaN once there is one."""

    def convert(context, x, dim):
        shape = _shape(context)
        dtype = dtype_of(x)
        x = at_least_1d(context, Formulas(context, "int8").cast(x, "int8") if dtype == "bool" else x)
        f = formulas(context, x)
        numbers = shape_of(x)
        view = [numbers[d] if d == dim % len(numbers) else 1 for d in range(len(numbers))]
        places = context.emit(op.reshape(context.emit(op.arange(0, numbers[dim], 1, "int64")), view))
        places = context.emit(op.broadcast_to(places, numbers))

        def combine(earlier, later):
            (a, i), (b, j) = earlier, later
            is_later = f.greater_equal(b, a) if is_largest else f.less_equal(b, a)
            if f.is_float:  # False where a is NaN
                is_later = f.any(f.isnan(b), is_later)
            return f.where(is_later, b, a), f.where(is_later, j, i)

        values, indices = scan(context, [x, places], dim, combine)
        return relax.Tuple([shaped(context, y, shape) for y in (f.cast(values, dtype), indices)])

    return convert


ORDERING_CONVERTERS = {
    "argmax.default": place(op.argmax),
    "argmin.default": place(op.argmin),
    "argsort.default": argsort,
    "cummax.default": cumulative_extreme(True),
    "cummin.default": cumulative_extreme(False),
    "kthvalue.default": kthvalue,
    "max.dim": extreme_and_place(op.max, op.argmax),
    "median.default": of_all(median),
    "median.dim": median,
    "min.dim": extreme_and_place(op.min, op.argmin),
    "nanmedian.default": of_all(nanmedian),
    "nanmedian.dim": nanmedian,
    "sort.default": sort,
    "sort.stable": stable_sort,
    "topk.default": topk,
}
