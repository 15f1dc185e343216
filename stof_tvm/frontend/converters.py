"""ATen operators to Relax, where TVM 0.27's own converters give wrong numbers, wrong types or hide structure.

A converter is `f(context, *arguments)`: arguments in the order of the operator's schema, tensors as Relax expressions,
defaults filled in.  What TVM does wrong is said at each one.
"""

import numpy as np
import torch
from tvm import relax

from stof_tvm.frontend.einsum import einsum
from tir_kernels.errors import UnsupportedError

op = relax.op
HALF = ("float16", "bfloat16")


# -- matrix products: TVM types them float32 whatever the operands are ---------------------------------------------


def linear(context, x, weight, bias=None):
    product = context.emit(op.matmul(x, context.emit(op.permute_dims(weight))))
    return product if bias is None else context.emit(op.add(product, bias))


def matmul(context, a, b, *_):
    return context.emit(op.matmul(a, b))


def addmm(context, x, a, b, beta, alpha):
    product = context.emit(op.matmul(a, b))
    if alpha != 1:
        product = context.emit(op.multiply(product, constant(alpha, product)))
    if beta == 0:
        return product
    return context.emit(op.add(product, x if beta == 1 else context.emit(op.multiply(x, constant(beta, x)))))


# -- norms and softmax: no bfloat16 layer_norm, no optional weights, half-precision sums ---------------------------


def layer_norm(context, x, normalized_shape, weight, bias, epsilon, *_):
    dtype = "float32" if _dtype(x) == "bfloat16" else _dtype(x)
    weight = relax.const(np.ones(normalized_shape), dtype) if weight is None else cast(context, weight, dtype)
    bias = relax.const(np.zeros(normalized_shape), dtype) if bias is None else cast(context, bias, dtype)
    axes = list(range(-len(normalized_shape), 0))
    return context.emit(op.nn.layer_norm(cast(context, x, dtype), weight, bias, axes, float(epsilon)))


def rms_norm(context, x, normalized_shape, weight, epsilon):
    if epsilon is None:  # PyTorch takes that of the type it computes in
        epsilon = torch.finfo(torch.float64 if _dtype(x) == "float64" else torch.float32).eps
    weight = relax.const(np.ones(normalized_shape), _dtype(x)) if weight is None else weight
    axes = list(range(-len(normalized_shape), 0))
    return context.emit(op.nn.rms_norm(x, cast(context, weight, _dtype(x)), axes, float(epsilon)))


def group_norm(context, x, weight, bias, n, channels, size, groups, epsilon):
    weight = relax.const(np.ones(channels), _dtype(x)) if weight is None else weight
    bias = relax.const(np.zeros(channels), _dtype(x)) if bias is None else bias
    x, weight, bias = (_accumulated(context, value) for value in (x, weight, bias))
    axes = list(range(2, len(x.ty.shape)))
    return context.emit(op.nn.group_norm(x, weight, bias, groups, 1, axes, float(epsilon)))


def softmax(context, x, dim, *_):
    return context.emit_at_site(op.nn.softmax(_accumulated(context, x), dim))


def log_softmax(context, x, dim, *_):
    return context.emit(op.nn.log_softmax(_accumulated(context, x), dim))


def cumulative_sum(context, x, dim, *_):
    """TVM sums booleans as booleans, which LLVM refuses."""
    return context.emit(op.cumsum(_accumulated(context, cast(context, x, context.dtype)), dim))


# -- selection: TVM casts masks, materialises the fill value or does not promote dtypes ----------------------------


def where(context, condition, x, y):
    # In this order: numbers become tensors as PyTorch's decomposition makes them, and logs know graphs by their text.
    y, x = (cast(context, _tensor(context, value), context.dtype) for value in (y, x))
    return context.emit(op.where(cast(context, condition, "bool"), x, y))


def masked_fill(context, x, mask, value):
    fill = cast(context, value, context.dtype) if isinstance(value, relax.Expr) else constant(value, x)
    return context.emit(op.where(cast(context, mask, "bool"), fill, cast(context, x, context.dtype)))


def largest(context, x, dim, keepdim=False):
    return context.emit(op.max(x, dim or None, keepdim))


def smallest(context, x, dim, keepdim=False):
    return context.emit(op.min(x, dim or None, keepdim))


def any_of(context, x, dim=None, keepdim=False):
    ones = context.emit(op.astype(cast(context, x, "bool"), "int32"))  # warps shuffle 32 bits at least
    axes = None if dim == [] else dim
    return context.emit(op.astype(context.emit(op.max(ones, axes, keepdim)), "bool"))


def comparison(operator):
    """The converter of eq or ne; LLVM compares no booleans."""

    def convert(context, x, y):
        dtype = context.dtype_of_operands
        dtype = "int8" if dtype == "bool" else dtype
        x, y = (cast(context, operand(value, dtype), dtype) for value in (x, y))
        return context.emit(operator(x, y))

    return convert


# -- indexing: TVM reads out of bounds for a negative or too large index -------------------------------------------


def embedding(context, weight, indices, *_):
    """Rows of an index outside the table come out as NaN; TVM's default mode reads whatever lies there."""
    flat = context.emit(op.reshape(cast(context, indices, "int32"), [-1]))
    rows = context.emit(op.take(weight, flat, axis=0, mode="nan"))
    return context.emit(op.reshape(rows, context.shape))


def select(context, x, dim, index):
    size = int(x.ty.shape[dim])
    # The index is in range; without a mode TVM warns that it might not be.
    return context.emit(op.take(x, relax.const(index % size, "int64"), axis=dim, mode="clip"))


def index_tensor(context, x, indices):
    """`x[i, :, j]` with integer tensors i, j, None standing for ":"."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(_dtype(index) in ("bool", "uint8") for _, index in given):
        raise UnsupportedError("indexing by a boolean tensor has a shape that depends on its values")
    given = [(axis, _from_end(context, index, int(x.ty.shape[axis]))) for axis, index in given]
    if len(given) == 1:
        axis, index = given[0]
        return context.emit(op.take(x, index, axis=axis, mode="clip"))
    axes = [axis for axis, _ in given]
    others = [axis for axis in range(len(x.ty.shape)) if axis not in axes]
    front = context.emit(op.permute_dims(x, axes + others)) if axes != list(range(len(axes))) else x
    picked = context.emit(op.index_tensor(front, [index for _, index in given]))
    if axes[-1] - axes[0] != len(axes) - 1 or axes[0] == 0:
        return picked  # PyTorch, too, puts the indexed dimensions first, unless the indices are neighbours
    rank = len(picked.ty.shape) - len(others)
    order = [rank + n for n in range(axes[0])] + list(range(rank)) + list(range(rank + axes[0], rank + len(others)))
    return context.emit(op.permute_dims(picked, order))


def _from_end(context, index, size):
    wrapped = context.emit(op.add(index, constant(size, index)))
    return context.emit(op.where(context.emit(op.less(index, constant(0, index))), wrapped, index))


# -- arithmetic: constants typed float32 or int32, powers through exp2(log2 x), which is NaN for x < 0 on a GPU --------


def divide_with_mode(context, x, y, mode):
    x, y = (cast(context, operand(value, context.dtype), context.dtype) for value in (x, y))
    if mode == "floor":
        return context.emit(op.floor_divide(x, y))
    if mode == "trunc" and "int" in context.dtype:
        quotient = context.emit(op.floor_divide(context.emit(op.abs(x)), context.emit(op.abs(y))))
        sign = context.emit(op.multiply(context.emit(op.sign(x)), context.emit(op.sign(y))))
        return context.emit(op.multiply(quotient, sign))
    quotient = context.emit(op.divide(x, y))
    return quotient if mode is None else context.emit(op.trunc(quotient))


def reverse_subtract(context, x, y, alpha):
    x, y = (cast(context, operand(value, context.dtype), context.dtype) for value in (x, y))
    return context.emit(op.subtract(y, _scaled(context, x, alpha)))


def add(context, x, y, alpha=1):
    """TVM drops `alpha`."""
    return _with_alpha(context, op.add, x, y, alpha)


def subtract(context, x, y, alpha=1):
    return _with_alpha(context, op.subtract, x, y, alpha)


def divide(context, x, y):
    """TVM divides integers as integers."""
    return _with_alpha(context, op.divide, x, y, 1)


def power(context, x, exponent):
    x = cast(context, x, context.dtype)
    if exponent == 0.5:
        return context.emit(op.sqrt(x))
    if exponent == -0.5:
        return context.emit(op.rsqrt(x))
    if float(exponent).is_integer() and 1 <= exponent <= 4:
        result = x
        for _ in range(int(exponent) - 1):
            result = context.emit(op.multiply(result, x))
        return result
    if exponent == 0:
        return context.emit(op.ones_like(x))
    wide = _accumulated(context, x)
    return context.emit(op.power(wide, constant(exponent, wide)))


def clamp(context, x, low=None, high=None):
    """TVM clips through float limits and broadcasts tensor limits only to x."""
    x = cast(context, x, context.dtype)
    for limit, bound in ((low, op.maximum), (high, op.minimum)):
        if limit is not None:
            x = context.emit(bound(x, cast(context, operand(limit, context.dtype), context.dtype)))
    return x


# -- creation and copies: TVM ignores or mishandles `dtype=` -------------------------------------------------------


def arange(context, start, end, step, *_):
    return context.emit(op.arange(start, end, step, context.dtype))


def arange_to(context, end, *_):
    return arange(context, 0, end, 1)


def arange_between(context, start, end, *_):
    return arange(context, start, end, 1)


def copy(context, x, *_, **__):
    return cast(context, x, context.dtype)


def filled(value):
    """The converter of an operator that makes a tensor of one value; PyTorch's record of the result says the rest.

    A scalar broadcast, because TVM cannot lower relax.full of an infinite value.
    """

    def convert(context, *_):
        return context.emit(op.broadcast_to(relax.const(value, context.dtype), context.shape))

    return convert


def full(context, _, value, *__):
    return filled(value)(context)


def concat(context, tensors, dim=0):
    """TVM refuses two dtypes, and cannot schedule empty tensors: what partial rotary positions leave of a head."""
    kept = [x for x in tensors if 0 not in [int(n) for n in x.ty.shape]] or tensors
    parts = [cast(context, x, context.dtype) for x in kept]
    return parts[0] if len(parts) == 1 else context.emit(op.concat(parts, dim))


def dropout(context, x, p, train):
    if train and p > 0:
        raise UnsupportedError(f"dropout (p={p}) stays active in evaluation mode, which an engine cannot repeat")
    return x


# -- helpers -------------------------------------------------------------------------------------------------------


def constant(value, like) -> relax.Expr:
    """A scalar constant of the dtype of `like`."""
    return relax.const(value, _dtype(like))


def operand(value, dtype) -> relax.Expr:
    """A tensor operand as it is, a Python number as a constant of `dtype`."""
    return value if isinstance(value, relax.Expr) else relax.const(value, dtype)


def _tensor(context, value) -> relax.Expr:
    """A tensor operand as it is, a Python number as a tensor of the result's dtype and no dimensions."""
    if isinstance(value, relax.Expr):
        return value
    return context.emit(op.broadcast_to(relax.const(value, context.dtype), []))


def _dtype(x) -> str:
    return str(x.ty.dtype)


def cast(context, x, dtype) -> relax.Expr:
    """`x` in a dtype, itself where it has it."""
    return x if _dtype(x) == dtype else context.emit(op.astype(x, dtype))


def _accumulated(context, x):
    return cast(context, x, "float32") if _dtype(x) in HALF else x


def _scaled(context, x, alpha):
    return x if alpha == 1 else context.emit(op.multiply(x, constant(alpha, x)))


def _with_alpha(context, operator, x, y, alpha):
    x, y = (cast(context, operand(value, context.dtype), context.dtype) for value in (x, y))
    return context.emit(operator(x, _scaled(context, y, alpha)))


CONVERTERS = {
    "linear.default": linear,
    "matmul.default": matmul,
    "mm.default": matmul,
    "bmm.default": matmul,
    "addmm.default": addmm,
    "baddbmm.default": addmm,
    "einsum.default": einsum,
    "layer_norm.default": layer_norm,
    "rms_norm.default": rms_norm,
    "native_group_norm.default": group_norm,
    "softmax.int": softmax,
    "_softmax.default": softmax,
    "cumsum.default": cumulative_sum,
    "log_softmax.int": log_softmax,
    "_log_softmax.default": log_softmax,
    "where.self": where,
    "where.Scalar": where,
    "where.ScalarOther": where,
    "where.ScalarSelf": where,
    "masked_fill.Scalar": masked_fill,
    "masked_fill.Tensor": masked_fill,
    "amax.default": largest,
    "amin.default": smallest,
    "any.default": any_of,
    "any.dim": any_of,
    "any.dims": any_of,
    "eq.Tensor": comparison(op.equal),
    "eq.Scalar": comparison(op.equal),
    "ne.Tensor": comparison(op.not_equal),
    "ne.Scalar": comparison(op.not_equal),
    "embedding.default": embedding,
    "select.int": select,
    "index.Tensor": index_tensor,
    "div.Tensor": divide,
    "div.Scalar": divide,
    "div.Tensor_mode": divide_with_mode,
    "div.Scalar_mode": divide_with_mode,
    "rsub.Tensor": reverse_subtract,
    "rsub.Scalar": reverse_subtract,
    "add.Tensor": add,
    "add.Scalar": add,
    "sub.Tensor": subtract,
    "sub.Scalar": subtract,
    "pow.Tensor_Scalar": power,
    "clamp.default": clamp,
    "clamp.Tensor": clamp,
    "clamp_min.default": clamp,
    "clamp_min.Tensor": clamp,
    "clamp_max.Tensor": lambda context, x, high: clamp(context, x, None, high),
    "clamp_max.default": lambda context, x, high: clamp(context, x, None, high),
    "arange.default": arange_to,
    "arange.start": arange_between,
    "arange.start_step": arange,
    "_to_copy.default": copy,
    "cat.default": concat,
    "clone.default": copy,
    "lift_fresh_copy.default": copy,
    "full.default": full,
    "full_like.default": full,
    "new_full.default": lambda context, x, size, value, *_: filled(value)(context),
    "ones.default": filled(1),
    "ones_like.default": filled(1),
    "new_ones.default": filled(1),
    "zeros.default": filled(0),
    "zeros_like.default": filled(0),
    "new_zeros.default": filled(0),
    "scalar_tensor.default": lambda context, value, *_: filled(value)(context),
    "dropout.default": dropout,
}
