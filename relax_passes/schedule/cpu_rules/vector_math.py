"""exp, tanh, sinh, sigmoid, erf and small powers as arithmetic that LLVM keeps in vectors: libm has only scalars.

Each replacement is within 4 units in the last place of fp32 over the whole range and gives what libm gives for
infinities and NaN.  fp16 is computed in fp32; bf16 goes through `widen_bf16` first.
"""

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

LOG2_E = 1.4426950408889634
# ln 2 in two parts: n * LN2_HIGH is exact for |n| < 2**10.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440054690583e-4
# (exp(r) - 1 - r) / r**2 by Taylor: the first term left out is below 2**-27 for |r| <= ln(2) / 2.
EXPM1_TAYLOR = [1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040]
# erf(x) / x = P(x**2) / Q(x**2) on [0, 3.92], by reweighted least squares: relative error 1.9e-8 before rounding.
ERF_LIMIT = 3.92
ERF_P = [1.1283791463, 1.9039831832e-1, 5.2747428325e-2, 3.7652083037e-3, 2.8486395403e-4, 2.0500260109e-6]
ERF_Q = [1.0, 5.0206885974e-1, 1.1410554781e-1, 1.4968404900e-2, 1.1624185158e-3, 3.8090093149e-5]


def expand_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with these calls on fp32 and fp16 replaced, and isnan replaced by a comparison of bits."""
    body = tvm_ffi.structural_map(func.body, (Call, _expand_call), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def exp(x):
    """e**x: 2**n * e**r with |r| <= ln(2) / 2."""
    x = _clamp(x, -104.0, 89.0)
    return _let(x, "x", lambda x: _with_exponent(x, lambda n, r: _scale(1.0 + _expm1_reduced(r), n)))


def tanh(x):
    """expm1(2x) / (expm1(2x) + 2), which keeps small x exact."""

    def quotient(n, r):
        power = _power_of_two(n)
        expm1 = power * _expm1_reduced(r) + (power - 1.0)
        return _let(expm1, "expm1", lambda e: e / (e + 2.0))

    return _let(_clamp(x * 2.0, -20.0, 20.0), "x", lambda x: _with_exponent(x, quotient))


def sinh(x):
    """(expm1(|x|) + expm1(|x|) / exp(|x|)) / 2 with the sign of x, from e = expm1(|x| / 2): nothing overflows early."""

    def combined(n, r):
        power = _power_of_two(n)
        expm1 = power * _expm1_reduced(r) + (power - 1.0)
        return _let(expm1, "e", lambda e: 0.5 * e * (e + 2.0) + 0.5 * (e / (e + 1.0)) * ((e + 2.0) / (e + 1.0)))

    def with_sign(x):
        half = _let(_clamp(tirx.abs(x) * 0.5, -64.0, 64.0), "x", lambda y: _with_exponent(y, combined))
        sign = tirx.reinterpret("uint32", x) & tirx.const(1 << 31, "uint32")
        return tirx.reinterpret("float32", tirx.reinterpret("uint32", half) | sign)

    return _let(x, "x", with_sign)


def sigmoid(x):
    """1 / (1 + e**-x)."""
    return 1.0 / (1.0 + exp(0.0 - x))


def erf(x):
    """A rational function of x**2, clamped to [-1, 1]."""

    def ratio(x):
        return _let(x * x, "t", lambda t: x * _polynomial(t, ERF_P) / _polynomial(t, ERF_Q))

    return _let(_let(_clamp(x, -ERF_LIMIT, ERF_LIMIT), "x", ratio), "erf", lambda y: _clamp(y, -1.0, 1.0))


def is_nan(x):
    """Whether a float's bits are beyond those of infinity: TVM's own form is not vectorised for every type."""
    unsigned, infinity = NAN_BITS[str(x.ty.dtype)]
    magnitude = tirx.const(2 ** (int(unsigned[4:]) - 1) - 1, unsigned)
    return (tirx.reinterpret(unsigned, x) & magnitude) > tirx.const(infinity, unsigned)


# The unsigned integer of a float's size and the bits of infinity.
NAN_BITS = {"float16": ("uint16", 0x7C00), "float32": ("uint32", 0x7F800000), "float64": ("uint64", 0x7FF << 52)}
EXPANSIONS = {"tirx.exp": exp, "tirx.tanh": tanh, "tirx.sigmoid": sigmoid, "tirx.sinh": sinh, "tirx.erf": erf}
EXPANDED_CALLS = frozenset({*EXPANSIONS, "tirx.pow"})


def _expand_call(call):
    if getattr(call.op, "name", "") == "tirx.isnan" and str(call.args[0].ty.dtype) in NAN_BITS:
        return is_nan(call.args[0])
    name, dtype = getattr(call.op, "name", ""), str(getattr(call.ty, "dtype", ""))
    if dtype not in ("float32", "float16"):
        return call
    if name in EXPANSIONS:
        value = EXPANSIONS[name](call.args[0].astype("float32"))
    elif name == "tirx.pow" and isinstance(call.args[1], tirx.FloatImm) and call.args[1].value in (2.0, 3.0, 4.0):
        value = _power(call.args[0].astype("float32"), int(call.args[1].value))
    else:
        return call
    return value.astype(dtype)


def _power(x, exponent: int):
    return _let(x, "x", lambda x: {2: x * x, 3: x * x * x, 4: (x * x) * (x * x)}[exponent])


def _with_exponent(x, body):
    """body(n, r) with x = n * ln(2) + r."""

    def reduced(n):
        return _let(x - n * LN2_HIGH - n * LN2_LOW, "r", lambda r: body(n, r))

    return _let(tirx.floor(x * LOG2_E + 0.5), "n", reduced)


def _expm1_reduced(r):
    """e**r - 1 for |r| <= ln(2) / 2."""
    return r + r * r * _polynomial(r, EXPM1_TAYLOR)


def _scale(value, n):
    """value * 2**n in two steps: 2**n alone may be too large or too small for fp32."""
    return _let(tirx.floor(n * 0.5), "half", lambda half: value * _power_of_two(half) * _power_of_two(n - half))


def _power_of_two(n):
    """2**n for a whole -126 <= n <= 127: n becomes the exponent bits."""
    return tirx.reinterpret("float32", (n.astype("int32") + 127) << 23)


def _polynomial(x, coefficients):
    """Horner's rule; the coefficients start with the constant one."""
    value = tirx.const(coefficients[-1], "float32")
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def _clamp(x, low: float, high: float):
    """x within [low, high]; NaN stays NaN, which max and min would lose."""
    upper = _let(x, "x", lambda x: tirx.Select(x > high, tirx.const(high, "float32"), x))
    return _let(upper, "x", lambda x: tirx.Select(x < low, tirx.const(low, "float32"), x))


def _let(value, name: str, body):
    """body(variable bound to value): the value is computed once however often the body uses it."""
    variable = tirx.Var(name, str(value.ty.dtype))
    return tirx.Let(variable, value, body(variable))
