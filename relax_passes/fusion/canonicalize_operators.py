"""Canonicalize operators: a norm or activation that the model writes out becomes one operator.

    w * (x / sqrt(mean(x * x) + eps)), or without w                  rms_norm
    the same of x - mean(x), with a bias or without                  layer_norm (both: written_norms.py)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))         gelu_tanh
    0.5 * x * (1 + erf(x / sqrt(2)))                                 gelu
    x * sigmoid(x)                                                   silu
    x between ±(max - 1000 if any(isinf(x)) else max)                clip between ±max, the largest finite number
    x between -b and b, as a minimum of a maximum                    clip
    x padded by nothing                                              x

Preconditions: "main" is one dataflow block, constants are bound; before `PartitionSegments`.  An expression is
replaced only if it computes exactly what the operator computes:

- The values are floats and have the shape of the result: no factor broadcasts.
- Factors may stand in any order.  Each constant may differ from the exact one by its rounding to the values' dtype; 1,
  1/2 and 2 are exact.
- Means of a norm are along the last dimension only.  The epsilon is not negative.  Weight and bias are vectors of the
  last dimension's length; other factors stay behind a norm of weight 1.
- A norm that is computed in a wider dtype and cast back before the weight is applied keeps its casts; the weight is
  then applied in the wider dtype, too.  The weight of a norm that is cast to a wider dtype stays behind it.

Half-precision models of the T5 family use the clamp to keep infinities from spreading.  Searching a whole tensor for
an infinity takes three passes over it; an elementwise bound needs none.  Where nothing overflows the two are equal.
Otherwise an element that overflowed is larger by at most 1000, and elements between the two bounds are unchanged.
"""

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relax_passes.fusion.written_norms import both_orders, emit_norm, is_float, match_norm, same
from relax_passes.ir.bindings import Bindings, dtype_of, static_shape
from relax_passes.ir.floats import EPSILON
from relax_passes.ir.rebuild import rebuild

op = relax.op
HEADROOM = 1000.0  # a clamp against overflow stays within this of the largest number; a lower bound is the model's own


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeOperators")
class CanonicalizeOperators:
    """Replace spelled-out norms, GELU, SiLU and clamps against overflow in "main"."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])

        def replace(builder, var, new):
            pad = bindings.call(var, "nn.pad")
            if pad is not None and not any(map(int, pad.attrs.pad_width)):
                return new(pad.args[0])
            if (norm := match_norm(bindings, var)) is not None:
                return emit_norm(builder.emit, norm, new, dtype_of(var))
            clipped = _match_overflow_clamp(bindings, var) or _match_clamp(bindings, var)
            if clipped is not None:
                x, bound = clipped
                return op.clip(new(x), -bound, bound)
            if (activation := _match_activation(bindings, var)) is not None:
                name, x = activation
                return getattr(op.nn, name)(new(x))
            return None

        return rebuild(mod, replace)


# -- clamps against overflow ---------------------------------------------------------------------------------------


def _match_overflow_clamp(bindings, var):
    """(x, max) where `var` is x between -b and b with b = where(any(isinf(x)), less, max), of float16."""
    largest = float(np.finfo("float16").max)
    for inner, upper in both_orders(bindings, var, "minimum"):
        for x, lower in both_orders(bindings, inner, "maximum"):
            bound = bindings.call(_before_cast(bindings, upper), "where")
            negated = bindings.call(_before_cast(bindings, lower), "negative")
            if bound is None or negated is None or not bound.same_as(bindings.value(negated.args[0])):
                continue
            less, most = (bindings.scalar(number) for number in bound.args[1:])
            is_bound = less is not None and largest - HEADROOM <= less < largest == most
            is_same = dtype_of(x) == "float16" and static_shape(x) == static_shape(var) is not None
            if is_bound and is_same and _asks_for_infinities(bindings, bound.args[0], x):
                return x, largest
    return None


def _match_clamp(bindings, var):
    """(x, b) where `var` is a float x between -b and b, one number."""
    for outer, inner, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        for bounded, first in both_orders(bindings, var, outer):
            for x, second in both_orders(bindings, bounded, inner):
                bounds = bindings.scalar(first), bindings.scalar(second)
                if None in bounds or not is_float(x) or static_shape(x) != static_shape(var):
                    continue
                if 0 < sign * bounds[0] < math.inf and bounds[0] == -bounds[1]:
                    return x, abs(bounds[0])
    return None


def _asks_for_infinities(bindings, expr, x) -> bool:
    """Whether `expr` is any(isinf(x)), written as a maximum of 0s and 1s; isinf(x) may be written |x| = inf."""
    largest = bindings.call(_before_cast(bindings, expr), "max")
    if largest is None or largest.attrs.axis is not None:
        return False
    asked = _before_cast(bindings, largest.args[0])
    if (infinite := bindings.call(asked, "isinf")) is not None:
        return infinite.args[0].same_as(x)
    for magnitude, number in both_orders(bindings, asked, "equal"):
        absolute = bindings.call(magnitude, "abs")
        if absolute is not None and bindings.scalar(number) == math.inf and absolute.args[0].same_as(x):
            return True
    return False


# -- activations ---------------------------------------------------------------------------------------------------


def _match_activation(bindings, var):
    """(name, x) where `var` is a product that spells an activation of x."""
    product = _factors(bindings, var)
    if len(product.tensors) != 2:
        return None
    for x, other in (product.tensors, reversed(product.tensors)):
        if not is_float(x) or static_shape(x) is None or static_shape(x) != static_shape(var):
            continue
        sigmoid = bindings.call(other, "sigmoid")
        if sigmoid is not None and same(bindings, sigmoid.args[0], x) and product.number == 1.0:
            return "silu", x
        for one, curve in both_orders(bindings, other, "add") if product.number == 0.5 else ():
            name = _match_gelu_curve(bindings, curve, x) if bindings.scalar(one) == 1.0 else None
            if name is not None:
                return name, x
    return None


def _match_gelu_curve(bindings, curve, x) -> str | None:
    """The GELU in whose factor 1 + curve(x) this curve stands: "gelu" or "gelu_tanh"; None if there is none."""
    erf = bindings.call(curve, "erf")
    if erf is not None:
        scaled = _factors(bindings, erf.args[0])
        is_erf = len(scaled.tensors) == 1 and same(bindings, scaled.tensors[0], x)
        return "gelu" if is_erf and scaled.is_rounded(math.sqrt(0.5), dtype_of(x)) else None
    tanh = bindings.call(curve, "tanh")
    inner = None if tanh is None else _factors(bindings, tanh.args[0])
    if inner is None or len(inner.tensors) != 1 or not inner.is_rounded(math.sqrt(2 / math.pi), dtype_of(x)):
        return None
    for linear, cubic in both_orders(bindings, inner.tensors[0], "add"):
        powers = _factors(bindings, cubic)
        if same(bindings, linear, x) and len(powers.tensors) == 3 and powers.is_rounded(0.044715, dtype_of(x)):
            return "gelu_tanh" if all(same(bindings, power, x) for power in powers.tensors) else None
    return None


@dataclass
class _Product:
    """A product of `tensors` and of `number`, which is itself the product of `constants` constants."""

    tensors: list
    number: float = 1.0
    constants: int = 0

    def is_rounded(self, exact: float, dtype: str) -> bool:
        """Whether the number is `exact` but for the rounding of its constants to `dtype`."""
        rounded = EPSILON[dtype] / 2 * self.constants
        return math.isclose(self.number, exact, rel_tol=rounded + 4 * EPSILON["float64"])


def _factors(bindings, expr) -> _Product:
    """The factors of `expr`, taken apart until none of them is a product."""
    product, pending = _Product([]), [expr]
    while pending:
        expr = pending.pop()
        value = bindings.scalar(expr)
        call, quotient = bindings.call(expr, "multiply"), bindings.call(expr, "divide")
        divisor = bindings.scalar(quotient.args[1]) if quotient is not None else None
        if value is not None:
            product.number *= value
            product.constants += 1
        elif call is not None:
            pending += reversed(call.args)
        elif divisor:
            product.number /= divisor
            product.constants += 1
            pending.append(quotient.args[0])
        else:
            product.tensors.append(expr)
    return product


def _before_cast(bindings, expr):
    cast = bindings.call(expr, "astype")
    return expr if cast is None else cast.args[0]
