"""Sums, means, norms, extremes and scans along dimensions; half precision is accumulated in float32.

A tensor of no dimensions is reduced as one of a single element.
"""

import math

from tvm import relax

from stof_tvm.frontend.operators.elementwise.formulas import HALF, Formulas
from stof_tvm.frontend.operators.elementwise.unary import log1p

op = relax.op


def dtype_of(x) -> str:
    return str(x.ty.dtype)


def shape_of(x) -> list[int]:
    return [int(n) for n in x.ty.shape]


def formulas(context, x) -> Formulas:
    """Formulas in the dtype that x is accumulated in."""
    return Formulas(context, "float32" if dtype_of(x) in HALF else dtype_of(x))


def at_least_1d(context, x):
    return x if x.ty.shape else context.emit(op.reshape(x, [1]))


def shaped(context, x, shape):
    return x if shape_of(x) == list(shape) else context.emit(op.reshape(x, list(shape)))


def size_of(x, dim) -> int:
    """How many elements are reduced to one."""
    shape = shape_of(x)
    dims = range(len(shape)) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    return math.prod(shape[d] for d in dims)


def reduce(context, operator, x, dim, keepdim):
    """`operator(x, axes, keepdims)`; no dims mean all."""
    if not x.ty.shape:
        x, dim = at_least_1d(context, x), 0
    result = context.emit(operator(x, None if dim == [] else dim, keepdim))
    return shaped(context, result, context.shape) if not context.shape else result


def _prepared(context, x):
    """x in the dtype of the result, half precision as float32."""
    x = Formulas(context, context.dtype).cast(x, context.dtype)
    return formulas(context, x).cast(x, formulas(context, x).dtype)


def accumulation(operator):
    """The converter of sum, mean or prod: it adds integers and booleans as int64, and applies `dtype=` first."""

    def convert(context, x, dim=None, keepdim=False, **_):
        return reduce(context, operator, _prepared(context, x), dim, keepdim)

    return convert


def of_all(operator):
    """The converter of an overload without dims, whose third argument is `dtype`."""
    convert = accumulation(operator)
    return lambda context, x, *_: convert(context, x)


def over_dims(operator):
    convert = accumulation(operator)
    return lambda context, x, dim, keepdim=False, *_: convert(context, x, dim, keepdim)


def extreme(operator):
    """amax, amin, max or min of all; booleans as bytes."""

    def convert(context, x, dim=None, keepdim=False):
        x = formulas(context, x).cast(x, "int8") if dtype_of(x) == "bool" else x
        return reduce(context, operator, x, dim, keepdim)

    return convert


def any_of(context, x, dim=None, keepdim=False):
    f = Formulas(context, "int32")  # warps shuffle 32 bits at least
    ones = f.cast(f.cast(x, "bool"), "int32")
    return f.cast(reduce(context, op.max, ones, dim, keepdim), "bool")


def variance(context, x, dim=None, correction=None, keepdim=False):
    """Divides by the number of elements less `correction` (default 1), or by 0 if that is negative, as in PyTorch."""
    result = _variance(context, x, dim, correction, keepdim)
    return shaped(context, result, context.shape)


def variance_and_mean(context, x, dim=None, correction=None, keepdim=False):
    shape = list(context.node.meta["val"][0].shape)
    x = _single(context, x)
    mean = context.emit(op.mean(at_least_1d(context, x), None if dim == [] or not x.ty.shape else dim, keepdim))
    result = _variance(context, x, dim, correction, keepdim)
    return relax.Tuple([shaped(context, value, shape) for value in (result, mean)])


def _variance(context, x, dim, correction, keepdim):
    x = _single(context, x)
    if not x.ty.shape:
        x, dim = at_least_1d(context, x), 0
    f = formulas(context, x)
    dim, count = None if dim == [] else dim, size_of(x, dim)
    result = context.emit(op.variance(x, dim, keepdim))
    left = max(count - (1 if correction is None else correction), 0)
    if left == count:
        return result
    if left == 0:  # 0/0 where all are equal, else x/0
        return f.where(f.greater(result, 0.0), f.operand(math.inf), f.operand(math.nan))
    return f.multiply(result, count / left)


def _single(context, x):
    f = formulas(context, x)
    return f.cast(x, f.dtype)


def vector_norm(context, x, order=2, dim=None, keepdim=False, *_):
    x = _prepared(context, x)
    return _norm(context, x, order, dim, keepdim, is_single=size_of(x, dim) == 1)


def _norm(context, x, order, dim, keepdim, is_single=False):
    """`is_single`: each norm is of one number; PyTorch takes no power of it, which may overflow."""
    f = formulas(context, x)
    if order in (math.inf, -math.inf):
        return reduce(context, op.max if order > 0 else op.min, f.abs(x), dim, keepdim)
    if order == 0:
        return reduce(context, op.sum, f.cast(f.not_equal(x, 0.0), f.dtype), dim, keepdim)
    if order == 1 or is_single:
        return reduce(context, op.sum, f.abs(x), dim, keepdim)
    if order == 2:
        return f.sqrt(reduce(context, op.sum, f.multiply(x, x), dim, keepdim))
    total = reduce(context, op.sum, f.power(f.abs(x), float(order)), dim, keepdim)
    return f.power(total, 1.0 / order)


def distances(context, x, y, order, *_):
    """cdist: the norm of the difference of each row of x (…, M, D) and each of y (…, N, D)."""
    x, y = (context.emit(op.expand_dims(_single(context, value), axis)) for value, axis in ((x, -2), (y, -3)))
    return _norm(context, context.emit(op.subtract(x, y)), order, [-1], False)


def cumulative(operator):
    """cumsum or cumprod; booleans are accumulated as integers."""

    def convert(context, x, dim, *_):
        x = at_least_1d(context, _prepared(context, x))
        return shaped(context, context.emit(operator(x, dim)), context.shape)

    return convert


def logcumsumexp(context, x, dim):
    """log(cumsum(exp(x))); each step subtracts the larger of two terms first, whose exponential may overflow."""
    x = at_least_1d(context, _single(context, x))
    f = formulas(context, x)

    def combine(earlier, later):
        (a,), (b,) = earlier, later
        large, small = f.maximum(a, b), f.minimum(a, b)
        # The difference of equal infinities is NaN.
        sums = f.add(large, log1p(f, f.exp(f.subtract(small, large))))
        infinite = f.equal(f.abs(large), math.inf)
        return (f.where(infinite, f.add(large, f.where(f.isnan(small), small, f.operand(0.0))), sums),)

    (result,) = scan(context, [x], dim, combine)
    return shaped(context, result, context.shape)


def scan(context, tensors, dim, combine):
    """Inclusive scan of tensors of one shape, in log2(length) steps; `combine(earlier, later)` is associative."""
    shape = shape_of(tensors[0])
    axis, length, shift = dim % len(shape), shape[dim], 1
    while shift < length:
        part = lambda x, start, end: context.emit(op.strided_slice(x, [axis], [start], [end]))
        combined = combine(
            [part(x, 0, length - shift) for x in tensors],
            [part(x, shift, length) for x in tensors],
        )
        tensors = [context.emit(op.concat([part(x, 0, shift), y], axis)) for x, y in zip(tensors, combined)]
        shift *= 2
    return tensors


REDUCTION_CONVERTERS = {
    "_cdist_forward.default": distances,
    "amax.default": extreme(op.max),
    "amin.default": extreme(op.min),
    "any.default": any_of,
    "any.dim": any_of,
    "any.dims": any_of,
    "cumprod.default": cumulative(op.cumprod),
    "cumsum.default": cumulative(op.cumsum),
    "linalg_vector_norm.default": vector_norm,
    "logcumsumexp.default": logcumsumexp,
    "max.default": extreme(op.max),
    "mean.default": of_all(op.mean),
    "mean.dim": over_dims(op.mean),
    "min.default": extreme(op.min),
    "prod.default": of_all(op.prod),
    "prod.dim_int": over_dims(op.prod),
    "sum.default": of_all(op.sum),
    "sum.dim_IntList": over_dims(op.sum),
    "var.correction": variance,
    "var_mean.correction": variance_and_mean,
}
