"""Canonicalize operators: a norm or an activation that the model spells out becomes the one operator that it is.

    w * (x * rsqrt(mean(x * x) + eps))                               rms_norm
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))         gelu_tanh
    0.5 * x * (1 + erf(x / sqrt(2)))                                 gelu
    x * sigmoid(x)                                                   silu
    x between ±(max - 1000 if any(isinf(x)) else max)                clip between ±max, the largest finite number

Preconditions: "main" is one dataflow block, constants are bound; before `PartitionFusionGroups`.  Factors may stand in
any order and constants may differ from the exact ones by what float16 rounds.  A norm that is computed in float32 and
cast back before the weight is applied keeps its casts; the weight is then applied in float32, too.

The last is how half precision models of the T5 family keep infinities from spreading.  Asking all of a tensor whether
there is one takes three passes over it; what is elementwise needs none.  Where nothing overflows the two are equal;
where something does, what overflowed is larger by at most 1000, and what lies between the two bounds stays as it is.
"""

import math

import numpy as np
import tvm
from tvm import relax

from relax_passes.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.fusion.rebuild import rebuild

op = relax.op
TOLERANCE = 2e-3
HEADROOM = 1000.0  # that a clamp against overflow leaves at most: what another leaves is not ours to give up


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeOperators")
class CanonicalizeOperators:
    """Replace spelled-out RMSNorm, GELU and SiLU in "main"."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])

        def replace(builder, var, new):
            if (norm := _match_rms_norm(bindings, var)) is not None:
                x, weight, eps = norm
                return _emit_rms_norm(builder, new(x), new(weight), eps, dtype_of(var))
            if (clipped := _match_overflow_clamp(bindings, var)) is not None:
                x, bound = clipped
                return op.clip(new(x), -bound, bound)
            if (activation := _match_activation(bindings, var)) is not None:
                name, x = activation
                return getattr(op.nn, name)(new(x))
            return None

        return rebuild(mod, replace)


# -- RMSNorm -------------------------------------------------------------------------------------------------------


def _match_rms_norm(bindings, var):
    """(x, weight, eps) where `var` is weight * [cast of] x * rsqrt(mean(x * x) + eps)."""
    for weight, normalized in _both_orders(bindings, var, "multiply"):
        if len(weight.ty.shape) != 1 or static_shape(weight) != shape_of(var)[-1:]:
            continue
        found = _match_normalized(bindings, _before_cast(bindings, normalized))
        if found is not None and static_shape(found[0]) == static_shape(var):
            return found[0], weight, found[1]
    return None


def _match_normalized(bindings, expr):
    """(x, eps) where `expr` is x * rsqrt(mean(x * x) + eps)."""
    for x, scale in _both_orders(bindings, expr, "multiply"):
        root = bindings.call(scale, "rsqrt")
        for mean, eps in _both_orders(bindings, root.args[0], "add") if root is not None else ():
            mean, eps = bindings.call(mean, "mean"), bindings.scalar(eps)
            if mean is None or eps is None or not _along_last(mean):
                continue
            square = bindings.call(mean.args[0], "multiply")
            if square is not None and all(_same(bindings, factor, x) for factor in square.args):
                return x, eps
    return None


def _emit_rms_norm(builder, x, weight, eps, dtype):
    wide = dtype_of(x)
    weight = weight if dtype_of(weight) == wide else builder.emit(op.astype(weight, wide))
    normalized = builder.emit(op.nn.rms_norm(x, weight, [-1], eps))
    return normalized if dtype == wide else op.astype(normalized, dtype)


def _along_last(mean) -> bool:
    axes, rank = mean.attrs.axis, len(mean.args[0].ty.shape)
    return axes is not None and [int(axis) % rank for axis in axes] == [rank - 1] and bool(mean.attrs.keepdims)


def _before_cast(bindings, expr):
    cast = bindings.call(expr, "astype")
    return expr if cast is None else cast.args[0]


# -- clamps against overflow ---------------------------------------------------------------------------------------


def _match_overflow_clamp(bindings, var):
    """(x, max) where `var` is x between -b and b with b = where(any(isinf(x)), less, max), of float16."""
    largest = float(np.finfo("float16").max)
    for inner, upper in _both_orders(bindings, var, "minimum"):
        for x, lower in _both_orders(bindings, inner, "maximum"):
            bound = bindings.call(_before_cast(bindings, upper), "where")
            negated = bindings.call(_before_cast(bindings, lower), "negative")
            if bound is None or negated is None or not bound.same_as(bindings.value(negated.args[0])):
                continue
            less, most = (bindings.scalar(number) for number in bound.args[1:])
            is_bound = less is not None and largest - HEADROOM <= less < largest == most
            if is_bound and dtype_of(x) == "float16" and _asks_for_infinities(bindings, bound.args[0], x):
                return x, largest
    return None


def _asks_for_infinities(bindings, expr, x) -> bool:
    """Whether `expr` is any(isinf(x)), the largest of numbers that are 0 or 1."""
    largest = bindings.call(_before_cast(bindings, expr), "max")
    infinite = None if largest is None else bindings.call(_before_cast(bindings, largest.args[0]), "isinf")
    return infinite is not None and largest.attrs.axis is None and infinite.args[0].same_as(x)


# -- activations ---------------------------------------------------------------------------------------------------


def _match_activation(bindings, var):
    """(name, x) where `var` is a product that spells an activation of x."""
    factors, number = _factors(bindings, var)
    if len(factors) != 2:
        return None
    for x, other in (factors, reversed(factors)):
        sigmoid = bindings.call(other, "sigmoid")
        if sigmoid is not None and _same(bindings, sigmoid.args[0], x) and number == 1.0:
            return "silu", x
        for one, curve in _both_orders(bindings, other, "add") if _near(number, 0.5) else ():
            name = _match_gelu_curve(bindings, curve, x) if bindings.scalar(one) == 1.0 else None
            if name is not None:
                return name, x
    return None


def _match_gelu_curve(bindings, curve, x) -> str | None:
    """Which GELU has this curve of x beside the 1."""
    erf = bindings.call(curve, "erf")
    if erf is not None:
        inner, number = _factors(bindings, erf.args[0])
        return "gelu" if len(inner) == 1 and _same(bindings, inner[0], x) and _near(number, math.sqrt(0.5)) else None
    tanh = bindings.call(curve, "tanh")
    inner, number = _factors(bindings, tanh.args[0]) if tanh is not None else ([], 0.0)
    if len(inner) != 1 or not _near(number, math.sqrt(2 / math.pi)):
        return None
    for linear, cubic in _both_orders(bindings, inner[0], "add"):
        powers, number = _factors(bindings, cubic)
        if _same(bindings, linear, x) and len(powers) == 3 and _near(number, 0.044715):
            return "gelu_tanh" if all(_same(bindings, power, x) for power in powers) else None
    return None


def _factors(bindings, expr) -> tuple[list, float]:
    """The tensors and the number whose product `expr` is, taken apart until nothing is a product any more."""
    number, tensors, pending = 1.0, [], [expr]
    while pending:
        expr = pending.pop()
        value = bindings.scalar(expr)
        product, quotient = bindings.call(expr, "multiply"), bindings.call(expr, "divide")
        divisor = bindings.scalar(quotient.args[1]) if quotient is not None else None
        if value is not None:
            number *= value
        elif product is not None:
            pending += reversed(product.args)
        elif divisor:
            number /= divisor
            pending.append(quotient.args[0])
        else:
            tensors.append(expr)
    return tensors, number


def _both_orders(bindings, expr, name):
    """The two orders of the operands, if `expr` is a call of the operator."""
    call = bindings.call(expr, name)
    return () if call is None else (tuple(call.args), tuple(reversed(call.args)))


def _same(bindings, a, b) -> bool:
    """Whether two expressions are one variable, or equal casts of one."""
    casts = [bindings.call(expr, "astype") for expr in (a, b)]
    if None not in casts and dtype_of(a) == dtype_of(b):
        a, b = (cast.args[0] for cast in casts)
    return a.same_as(b)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE)
