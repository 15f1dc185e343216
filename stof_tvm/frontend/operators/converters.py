"""ATen operators to Relax, where TVM 0.27's own converters give wrong numbers, wrong types or hide structure.

A converter is `f(context, *arguments)`: arguments in the order of the operator's schema, tensors as Relax expressions,
defaults filled in.  Comments say what TVM does wrong.
"""

import numpy as np
import torch
from tvm import relax

from stof_tvm.frontend.operators.einsum import einsum
from stof_tvm.frontend.operators.elementwise.formulas import Formulas
from tir_kernels.errors import UnsupportedError

op = relax.op
HALF = ("float16", "bfloat16")


# -- matrix products: TVM types them float32 whatever the operands are ---------------------------------------------


def linear(context, x, weight, bias=None):
    product = context.emit(op.matmul(x, context.emit(op.permute_dims(weight))))
    return product if bias is None else context.emit(op.add(product, bias))


def matmul(context, a, b, *_):
    return context.emit_in_module(op.matmul(a, b))


def addmm(context, x, a, b, beta, alpha):
    product = context.emit(op.matmul(a, b))
    if alpha != 1:
        product = context.emit(op.multiply(product, constant(alpha, product)))
    if beta == 0:
        return product
    return context.emit(op.add(product, x if beta == 1 else context.emit(op.multiply(x, constant(beta, x)))))


# -- norms and softmax: TVM has no bfloat16 layer_norm and no optional weights, and sums in half precision ---------


def layer_norm(context, x, normalized_shape, weight, bias, epsilon, *_):
    dtype = "float32" if _dtype(x) == "bfloat16" else _dtype(x)
    weight = relax.const(np.ones(normalized_shape), dtype) if weight is None else cast(context, weight, dtype)
    bias = relax.const(np.zeros(normalized_shape), dtype) if bias is None else cast(context, bias, dtype)
    axes = list(range(-len(normalized_shape), 0))
    rows = _with_rows(context, cast(context, x, dtype), axes)
    return _of_shape(context, op.nn.layer_norm(rows, weight, bias, axes, float(epsilon)), x)


def rms_norm(context, x, normalized_shape, weight, epsilon):
    if epsilon is None:  # PyTorch's default is that of the dtype in which it computes
        epsilon = torch.finfo(torch.float64 if _dtype(x) == "float64" else torch.float32).eps
    weight = relax.const(np.ones(normalized_shape), _dtype(x)) if weight is None else cast(context, weight, _dtype(x))
    axes = list(range(-len(normalized_shape), 0))
    if _dtype(x) == "float64":  # TVM computes in float32
        f = Formulas(context, "float64")
        mean = context.emit(op.mean(f.multiply(x, x), axes, True))
        return f.multiply(f.multiply(x, f.rsqrt(f.add(mean, float(epsilon)))), weight)
    return _of_shape(context, op.nn.rms_norm(_with_rows(context, x, axes), weight, axes, float(epsilon)), x)


def _with_rows(context, x, axes):
    """x with a dimension before the normalized ones, because TVM needs one there."""
    shape = [int(n) for n in x.ty.shape]
    return x if len(shape) > len(axes) else context.emit(op.reshape(x, [1, *shape]))


def _of_shape(context, expr, x):
    result, shape = context.emit(expr), [int(n) for n in x.ty.shape]
    return result if len(result.ty.shape) == len(shape) else context.emit(op.reshape(result, shape))


def group_norm(context, x, weight, bias, n, channels, size, groups, epsilon):
    weight = relax.const(np.ones(channels), _dtype(x)) if weight is None else weight
    bias = relax.const(np.zeros(channels), _dtype(x)) if bias is None else bias
    x, weight, bias = (_accumulated(context, value) for value in (x, weight, bias))
    axes = list(range(2, len(x.ty.shape)))
    return context.emit(op.nn.group_norm(x, weight, bias, groups, 1, axes, float(epsilon)))


def softmax(context, x, dim, *_):
    return context.emit_pivot(op.nn.softmax(_accumulated(context, cast(context, x, context.dtype)), dim))


def log_softmax(context, x, dim, *_):
    call = op.nn.log_softmax(_accumulated(context, cast(context, x, context.dtype)), dim)
    return context.emit_pivot(call)


def exponential(context, x):
    """An exponential that may turn an attention's scores into weights names a site, as a softmax does."""
    call = op.exp(cast(context, x, context.dtype))
    return context.emit_pivot(call)


# -- selection: TVM casts masks, materialises the fill value or does not promote dtypes ----------------------------


def where(context, condition, x, y):
    # y before x, as PyTorch's decomposition makes tensors of numbers: tuning logs identify a graph by its text.
    y, x = (cast(context, _tensor(context, value), context.dtype) for value in (y, x))
    return context.emit(op.where(cast(context, condition, "bool"), x, y))


def masked_fill(context, x, mask, value):
    fill = cast(context, value, context.dtype) if isinstance(value, relax.Expr) else constant(value, x)
    return context.emit(op.where(cast(context, mask, "bool"), fill, cast(context, x, context.dtype)))


# -- limits ---------------------------------------------------------------------------------------------------------


def clamp(context, x, low=None, high=None):
    """TVM's converter turns limits into floats, and broadcasts tensor limits only to x."""
    dtype = "int8" if context.dtype == "bool" else context.dtype
    x = cast(context, x, dtype)
    for limit, bound in ((low, op.maximum), (high, op.minimum)):
        if limit is not None:
            x = context.emit(bound(x, cast(context, operand(limit, dtype), dtype)))
    return x


# -- creation and copies: TVM ignores or mishandles `dtype=` -------------------------------------------------------


def arange(context, start, end, step, *_):
    """TVM's arange for increasing integers; else PyTorch's values, as TVM counts otherwise and adds up the steps."""
    if step > 0 and all(isinstance(x, int) for x in (start, end, step)):
        return context.emit(op.arange(start, end, step, context.dtype))
    values = torch.arange(start, end, step, dtype=getattr(torch, context.dtype))
    wide = values.float() if context.dtype == "bfloat16" else values  # NumPy has no bfloat16
    return cast(context, relax.const(wide.numpy()), context.dtype)


def arange_to(context, end, *_):
    return arange(context, 0, end, 1)


def arange_between(context, start, end, *_):
    return arange(context, start, end, 1)


def copy(context, x, *_, **__):
    return cast(context, x, context.dtype)


def filled(value):
    """The converter of an operator that makes a tensor of one value; PyTorch has recorded its shape and dtype.

    It broadcasts a scalar, because TVM cannot lower relax.full of an infinite value.
    """

    def convert(context, *_):
        return context.emit(op.broadcast_to(relax.const(value, context.dtype), context.shape))

    return convert


def full(context, _, value, *__):
    return filled(value)(context)


def copy_into(context, x, source, *_):
    return context.emit(op.broadcast_to(cast(context, source, context.dtype), context.shape))


def concat(context, tensors, dim=0):
    """TVM refuses two dtypes, and cannot schedule empty tensors (partial rotary positions may leave one of a head)."""
    kept = [x for x in tensors if 0 not in [int(n) for n in x.ty.shape]] or tensors
    parts = [cast(context, x, context.dtype) for x in kept]
    return parts[0] if len(parts) == 1 else context.emit(op.concat(parts, dim))


def dropout(context, x, p, train):
    if train and p > 0:
        raise UnsupportedError(
            f"dropout (p={p}) is active, which an engine cannot repeat: call model.eval() before it is exported or "
            "compiled; a forward that calls F.dropout itself has to pass training=self.training"
        )
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
    """`x` cast to `dtype`; `x` itself if it has that dtype."""
    return x if _dtype(x) == dtype else context.emit(op.astype(x, dtype))


def _accumulated(context, x):
    return cast(context, x, "float32") if _dtype(x) in HALF else x


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
    "log_softmax.int": log_softmax,
    "exp.default": exponential,
    "_log_softmax.default": log_softmax,
    "where.self": where,
    "where.Scalar": where,
    "where.ScalarOther": where,
    "where.ScalarSelf": where,
    "masked_fill.Scalar": masked_fill,
    "masked_fill.Tensor": masked_fill,
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
    "copy.default": copy_into,
    "empty.memory_format": filled(0),
    "fill.Scalar": lambda context, _, value: filled(value)(context),
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
