"""The elementwise operators of a group: each as an expression of TIR, and in PyTorch.

Floats are float32.  An operator in `APPROXIMATE` is right to half precision's accuracy only: fast math computes it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.fusion.problem import Step
from tir_kernels.fusion.steps import LOG2E, activation


class Elementwise(NamedTuple):
    """`expression(*x, *numbers)` in TIR; `torch(module, *x, *numbers)` in PyTorch."""

    expression: Callable
    torch: Callable


def _opaque(x):
    """x, in a form in which TVM's simplifier does not know it again: inf - inf is NaN, and NaN == NaN is false."""
    return tirx.reinterpret("float32", tirx.reinterpret("int32", x)) if str(x.ty.dtype) == "float32" else x


def _equal(a, b):
    """a == b as an expression: TVM's operator gives what may still become a comparison of objects, without a type."""
    return (a == b).asobject()


def _not(x):
    """Whether x is false; TVM makes b <= a of not(a < b), and LLVM's a != b is false where one is NaN."""
    return _equal(T.cast(x, "int32"), 0)


def _apart(combine):
    """`combine(a, b)`, where one may be the number 0: TVM folds 0 * x and 0 / x, NaN of some x, and refuses x / 0."""

    def combined(a, b):
        return combine(_unknown_zero(a, b), _unknown_zero(b, a))

    return combined


def _unknown_zero(x, other):
    """x; if it is the number 0, an expression of `other` that the simplifier does not know to be 0."""
    if not isinstance(x, tirx.FloatImm) or x.value != 0 or isinstance(other, tirx.FloatImm):
        return x
    sign = -(1 << 31) if math.copysign(1, x.value) < 0 else 0
    return tirx.reinterpret("float32", tirx.reinterpret("int32", other) & 0 | sign)


def _maximum(a, b):
    return T.Select(T.Or(a > b, _is_nan(a)), a, b)  # a NaN among them stays, as in PyTorch


def _minimum(a, b):
    return T.Select(T.Or(a < b, _is_nan(a)), a, b)


def _is_nan(x):
    return T.isnan(x) if "float" in str(x.ty.dtype) else T.bool(False)


def _clip(x, low, high):
    bound = lambda value: T.cast(T.float32(value), x.ty.dtype)
    return T.Select(x < bound(low), bound(low), T.Select(x > bound(high), bound(high), x))


def _erf(x):
    """The exact GELU holds Φ: erf(x) = sign(x) (1 - 2 · erfc(|x|) / 2), by the same polynomial."""
    positive = activation(Step("gelu"))(T.abs(x) * T.float32(math.sqrt(2)))
    # gelu(z) = z Φ(z) and Φ(z) = (1 + erf(z / √2)) / 2; near 0 the quotient has no value, and erf(x) = 2x / √π.
    small = T.abs(x) < T.float32(1e-3)
    ratio = positive / T.Select(small, T.float32(1), T.abs(x) * T.float32(math.sqrt(2)))
    magnitude = ratio * T.float32(2) - T.float32(1)
    signed = T.Select(x < T.float32(0), T.float32(0) - magnitude, magnitude)
    return T.Select(small, x * T.float32(2 / math.sqrt(math.pi)), signed)


# 2π in two summands; the first has so few bits that its product with up to 2^16 turns is exact.
TURN = 6.28125, 2 * math.pi - 6.28125


def _within_a_turn(x):
    """x less full turns, as fast math knows sines near 0 only; within 1e-5 for |x| up to 4e5."""
    turns = T.round(x * T.float32(1 / (2 * math.pi)))
    for part in TURN:
        x = _opaque(x - turns * T.float32(part))
    return x


_LARGEST = T.float32((2 - 2**-23) * 2.0**127)  # a finite one: nvcc has no name of infinity without a header
ELEMENTWISE: dict[str, Elementwise] = {
    "add": Elementwise(lambda a, b: a + b, lambda torch, a, b: a + b),
    "subtract": Elementwise(lambda a, b: _opaque(a) - b, lambda torch, a, b: a - b),
    "multiply": Elementwise(_apart(lambda a, b: a * b), lambda torch, a, b: a * b),
    "divide": Elementwise(_apart(lambda a, b: a / b), lambda torch, a, b: a / b),
    "floor_divide": Elementwise(tirx.floordiv, lambda torch, a, b: torch.div(a, b, rounding_mode="floor")),
    "floor_mod": Elementwise(tirx.floormod, lambda torch, a, b: torch.remainder(a, b)),
    "maximum": Elementwise(_maximum, lambda torch, a, b: torch.maximum(a, b)),
    "minimum": Elementwise(_minimum, lambda torch, a, b: torch.minimum(a, b)),
    "negative": Elementwise(lambda x: x * T.cast(T.int32(-1), x.ty.dtype), lambda torch, x: -x),
    "abs": Elementwise(lambda x: T.abs(x), lambda torch, x: x.abs()),
    "square": Elementwise(lambda x: x * x, lambda torch, x: x * x),
    "sqrt": Elementwise(lambda x: T.sqrt(x), lambda torch, x: x.sqrt()),
    "rsqrt": Elementwise(lambda x: T.rsqrt(x), lambda torch, x: x.rsqrt()),
    "exp": Elementwise(lambda x: T.exp2(x * T.float32(LOG2E)), lambda torch, x: x.exp()),
    "sin": Elementwise(lambda x: T.sin(_within_a_turn(x)), lambda torch, x: x.sin()),
    "cos": Elementwise(lambda x: T.cos(_within_a_turn(x)), lambda torch, x: x.cos()),
    "erf": Elementwise(_erf, lambda torch, x: x.erf()),
    "tanh": Elementwise(activation(Step("tanh")), lambda torch, x: x.tanh()),
    "sigmoid": Elementwise(activation(Step("sigmoid")), lambda torch, x: x.sigmoid()),
    "relu": Elementwise(activation(Step("relu")), lambda torch, x: torch.relu(x)),
    "gelu": Elementwise(activation(Step("gelu")), lambda torch, x: torch.nn.functional.gelu(x)),
    "gelu_tanh": Elementwise(
        activation(Step("gelu_tanh")), lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh")
    ),
    "silu": Elementwise(activation(Step("silu")), lambda torch, x: torch.nn.functional.silu(x)),
    "clip": Elementwise(_clip, lambda torch, x, low, high: x.clamp(low, high)),
    "where": Elementwise(lambda c, a, b: T.Select(c, a, b), lambda torch, c, a, b: torch.where(c, a, b)),
    "equal": Elementwise(lambda a, b: _equal(_opaque(a), b), lambda torch, a, b: a == b),
    "not_equal": Elementwise(lambda a, b: _not(_equal(_opaque(a), b)), lambda torch, a, b: a != b),
    "less": Elementwise(lambda a, b: a < b, lambda torch, a, b: a < b),
    "less_equal": Elementwise(lambda a, b: a <= b, lambda torch, a, b: a <= b),
    "greater": Elementwise(lambda a, b: a > b, lambda torch, a, b: a > b),
    "greater_equal": Elementwise(lambda a, b: a >= b, lambda torch, a, b: a >= b),
    "isnan": Elementwise(_is_nan, lambda torch, x: x.isnan()),
    "isinf": Elementwise(lambda x: T.abs(x) > _LARGEST, lambda torch, x: x.isinf()),
    "isfinite": Elementwise(lambda x: T.abs(x) <= _LARGEST, lambda torch, x: x.isfinite()),
    "logical_and": Elementwise(lambda a, b: T.And(a, b), lambda torch, a, b: a & b),
    "logical_or": Elementwise(lambda a, b: T.Or(a, b), lambda torch, a, b: a | b),
    "logical_not": Elementwise(_not, lambda torch, x: ~x),
}
APPROXIMATE = frozenset({"exp", "sin", "cos", "erf", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu"})
OF_FLOATS = APPROXIMATE | {"sqrt", "rsqrt", "relu", "divide", "clip", "isnan", "isinf", "isfinite"}
OF_INTEGERS = frozenset({"floor_divide", "floor_mod"})
OF_BOOLEANS = frozenset({"logical_and", "logical_or", "logical_not"})
