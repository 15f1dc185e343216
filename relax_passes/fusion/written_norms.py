"""Norms of rows that a model writes out with means and roots: what they normalise, and by which weight and bias.

    (x - mean(x)) / sqrt(mean((x - mean(x))²) + eps)        a layer norm of x; the second mean may be variance(x)
    x / sqrt(mean(x²) + eps)                                an RMS norm of x

A factor rsqrt(…) or 1 / sqrt(…) divides, too, and a mean may be a sum over the number of its elements.  Means are those
of the last dimension and keep it.  The epsilon is not negative.  A weight and a bias are vectors of the last dimension.
A norm that is computed in a wider dtype may be cast back before the weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.ir.floats import EPSILON

op = relax.op


@dataclass(frozen=True)
class WrittenNorm:
    """`kind` is "layer_norm" or "rms_norm"; without a weight or bias these are None."""

    kind: str
    x: relax.Expr
    eps: float
    weight: relax.Expr | None = None
    bias: relax.Expr | None = None


def match_norm(bindings: Bindings, var) -> WrittenNorm | None:
    """The norm that `var` is: with weight and bias, with a weight, or without, whichever is the most."""
    if static_shape(var) is None or not is_float(var):
        return None
    for bias, weighted in both_orders(bindings, var, "add"):
        norm = _match_scaled(bindings, weighted) if _is_vector(bias, var) else None
        if norm is not None and norm.kind == "layer_norm" and static_shape(norm.x) == static_shape(var):
            return replace(norm, bias=bias)
    norm = _match_scaled(bindings, var)
    return norm if norm is not None and static_shape(norm.x) == static_shape(var) else None


def emit_norm(emit, norm: WrittenNorm, new, dtype: str) -> relax.Expr:
    """The operator, computed in the dtype of what it normalises and cast to `dtype`."""
    x, wide = new(norm.x), dtype_of(norm.x)

    def vector(expr, filling):
        if expr is None:
            return relax.const(np.full(int(x.ty.shape[-1]), filling, "float32").astype(wide), wide)
        return new(expr) if dtype_of(expr) == wide else emit(op.astype(new(expr), wide))

    weight = vector(norm.weight, 1)
    if norm.kind == "rms_norm":
        found = emit(op.nn.rms_norm(x, weight, [-1], norm.eps))
    else:
        found = emit(op.nn.layer_norm(x, weight, vector(norm.bias, 0), [-1], norm.eps))
    return found if dtype == wide else op.astype(found, dtype)


def _match_scaled(bindings, var) -> WrittenNorm | None:
    """A norm with a weight, or without."""
    for weight, normalized in both_orders(bindings, var, "multiply"):
        norm = _match_plain(bindings, _before_narrowing(bindings, normalized)) if _is_vector(weight, var) else None
        if norm is not None and static_shape(norm.x) == static_shape(var):
            return replace(norm, weight=weight)
    return _match_plain(bindings, var)


def _match_plain(bindings, expr) -> WrittenNorm | None:
    for numerator, squared in _quotients(bindings, expr):
        for mean, eps in both_orders(bindings, squared, "add"):
            eps = bindings.scalar(eps)
            if eps is None or not eps >= 0 or not is_float(numerator):
                continue
            if (found := _match_mean_square(bindings, mean, numerator)) is not None:
                return WrittenNorm(*found, eps)
    return None


def _quotients(bindings, expr) -> Iterator[tuple]:
    """(x, v) of each way to read `expr` as x / sqrt(v)."""
    for x, scale in both_orders(bindings, expr, "multiply"):
        scale = _without_one(bindings, scale)
        root, quotient = bindings.call(scale, "rsqrt"), bindings.call(scale, "divide")
        if root is not None:
            yield x, root.args[0]
        elif quotient is not None and bindings.scalar(quotient.args[0]) == 1:
            yield from ((x, root.args[0]) for root in _calls(bindings, quotient.args[1], "sqrt"))
    for quotient in _calls(bindings, expr, "divide"):
        yield from ((quotient.args[0], root.args[0]) for root in _calls(bindings, quotient.args[1], "sqrt"))


def _match_mean_square(bindings, mean, numerator) -> tuple[str, relax.Expr] | None:
    """("layer_norm", x) if `numerator` is x - mean(x) and `mean` its mean square, else ("rms_norm", numerator)."""
    x = _centered(bindings, numerator)
    for variance in _calls(bindings, mean, "variance"):
        is_own = x is not None and same(bindings, variance.args[0], x)
        return ("layer_norm", x) if is_own and _along_last(variance) else None
    for square in _calls(bindings, _averaged(bindings, mean), "multiply"):
        if all(same(bindings, factor, numerator) for factor in square.args):
            return ("rms_norm", numerator) if x is None else ("layer_norm", x)
        others = [_centered(bindings, factor) for factor in square.args]
        if x is not None and all(other is not None and same(bindings, other, x) for other in others):
            return "layer_norm", x
    return None


def _centered(bindings, expr) -> relax.Expr | None:
    """x, where `expr` is x - mean(x)."""
    for difference in _calls(bindings, expr, "subtract"):
        averaged = _averaged(bindings, difference.args[1])
        if averaged is not None and same(bindings, averaged, difference.args[0]):
            return difference.args[0]
    return None


def _averaged(bindings, expr) -> relax.Expr | None:
    """What `expr` is the mean of, along the last dimension, which it keeps."""
    for mean in _calls(bindings, expr, "mean"):
        return mean.args[0] if _along_last(mean) else None
    for quotient in _calls(bindings, expr, "divide"):
        for total in _calls(bindings, quotient.args[0], "sum"):
            if _along_last(total) and bindings.scalar(quotient.args[1]) == _length(total):
                return total.args[0]
    for total, factor in both_orders(bindings, expr, "multiply"):
        if (number := bindings.scalar(factor)) is None:
            continue
        for call in _calls(bindings, total, "sum"):
            count = _length(call) if _along_last(call) and is_float(expr) else None
            if count is not None and math.isclose(number * count, 1, rel_tol=EPSILON[dtype_of(expr)] / 2):
                return call.args[0]
    return None


def _length(reduction) -> int | None:
    """How many elements a reduction along the last dimension joins, if it is a number."""
    shape = static_shape(reduction.args[0])
    return None if shape is None else shape[-1]


def _without_one(bindings, expr) -> relax.Expr:
    """`expr` without a factor of 1."""
    for x, factor in both_orders(bindings, expr, "multiply"):
        if bindings.scalar(factor) == 1 and static_shape(x) == static_shape(expr):
            return x
    return expr


def _along_last(reduction) -> bool:
    axes, rank = reduction.attrs.axis, len(reduction.args[0].ty.shape)
    return axes is not None and [int(axis) % rank for axis in axes] == [rank - 1] and bool(reduction.attrs.keepdims)


def _calls(bindings, expr, name: str) -> list:
    """The call of an operator that `expr` is bound to, if it is."""
    call = None if expr is None else bindings.call(expr, name)
    return [] if call is None else [call]


def _is_vector(expr, of) -> bool:
    """Whether `expr` has one element for each of the last dimension of `of`."""
    return isinstance(expr.ty, relax.TensorType) and static_shape(expr) == shape_of(of)[-1:] and is_float(expr)


def _before_narrowing(bindings, expr):
    """`expr` before a cast from a wider float type."""
    cast = bindings.call(expr, "astype")
    wide = expr if cast is None else cast.args[0]
    is_narrowed = is_float(wide) and is_float(expr) and EPSILON[dtype_of(wide)] < EPSILON[dtype_of(expr)]
    return wide if is_narrowed else expr


def both_orders(bindings, expr, name):
    """The two orders of the operands, if `expr` is a call of the operator."""
    call = bindings.call(expr, name)
    return () if call is None else (tuple(call.args), tuple(reversed(call.args)))


def same(bindings, a, b) -> bool:
    """Whether two expressions are one variable, or equal casts of one."""
    casts = [bindings.call(expr, "astype") for expr in (a, b)]
    if None not in casts and dtype_of(a) == dtype_of(b):
        a, b = (cast.args[0] for cast in casts)
    return a.same_as(b)


def is_float(expr) -> bool:
    """Whether a tensor holds floats."""
    return dtype_of(expr) in EPSILON
