"""Elementwise operators of one tensor, as PyTorch defines them at NaN, infinities, ties and for integers."""

import math

from tvm import relax

from relax_passes.ir.formulas.log1p import emit_log1p
from stof_tvm.frontend.operators.elementwise.promotion import Elementwise
from tir_kernels.errors import UnsupportedError


def native(name, **options) -> Elementwise:
    """The Relax operator that means the same."""
    return Elementwise(lambda f, x: getattr(f, name)(x), **{"half": True, **options})


def rounding(name) -> Elementwise:
    """A rounding operator; integers stay as they are."""
    return Elementwise(lambda f, x: getattr(f, name)(x) if f.is_float else x, half=True)


def round_to(f, x, decimals=0):
    if not f.is_float:
        return x
    if decimals == 0:
        return f.round(x)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return f.divide(f.round(f.multiply(x, scale)), scale)
    return f.multiply(f.round(f.divide(x, scale)), scale)


def expm1(f, x):
    """Near 0 a Taylor series: exp(x) - 1 loses the digits of a small x, and sinh of a vector has no CPU code."""
    near = f.where(f.less(f.abs(x), 0.35), x, f.operand(0.0))
    series = _series(f, near, [1 / math.factorial(n) for n in range(1, 14 if f.dtype == "float64" else 9)])
    return f.where(f.less(f.abs(x), 0.35), f.multiply(series, near), f.subtract(f.exp(x), 1.0))


def log1p(f, x):
    return emit_log1p(f.context.emit, x)


def _series(f, x, coefficients):
    """c0 + c1 x + c2 x² + …"""
    result = f.operand(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = f.add(f.multiply(result, x), coefficient)
    return result


def atanh(f, x):
    """TVM's own atanh loses the digits of a small x."""
    return f.multiply(0.5, log1p(f, f.divide(f.multiply(2.0, x), f.subtract(1.0, x))))


def erfc(f, x):
    """By Chebyshev coefficients (Numerical Recipes, 6.2): 1 - erf(x) loses all digits for a large x."""
    _check_single(f)
    size = f.minimum(f.abs(x), 30.0)  # beyond 30, erfc is 0
    t = f.divide(1.0, f.add(1.0, f.multiply(0.5, size)))
    coefficients = [0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807]
    coefficients += [-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223]
    series = f.operand(coefficients[0])
    for coefficient in coefficients[1:]:
        series = f.add(f.multiply(series, t), coefficient)
    # For a large x, exp(-x²) has the error of x².  So it is the product of exp of an exact square and exp of the rest.
    short = f.divide(f.floor(f.multiply(size, 16.0)), 16.0)
    rest = f.multiply(f.subtract(short, size), f.add(short, size))
    exact = f.exp(f.negative(f.multiply(short, short)))
    tail = f.multiply(f.multiply(t, f.exp(f.add(series, rest))), exact)
    return f.where(f.less(x, 0.5), f.subtract(1.0, f.erf(x)), tail)


def _check_single(f):
    if f.dtype == "float64":
        raise UnsupportedError("float64, of which it has the digits of float32 only")


def erfinv(f, x):
    """M. Giles' approximation in single precision."""
    _check_single(f)
    central = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087]
    central += [-0.00125372503, -0.00417768164, 0.246640727, 1.50140941]
    tails = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773]
    tails += [-0.0076224613, 0.00943887047, 1.00167406, 2.83297682]
    w = f.negative(f.log(f.multiply(f.subtract(1.0, x), f.add(1.0, x))))
    first, second = f.subtract(w, 2.5), f.subtract(f.sqrt(w), 3.0)
    series = f.operand(central[0]), f.operand(tails[0])
    for a, b in zip(central[1:], tails[1:]):
        series = f.add(f.multiply(series[0], first), a), f.add(f.multiply(series[1], second), b)
    result = f.multiply(f.where(f.less(w, 5.0), *series), x)
    return f.where(f.equal(f.abs(x), 1.0), f.multiply(x, math.inf), result)


def elu(f, x, alpha=1, scale=1, input_scale=1):
    """TVM's converter takes `scale` and `input_scale` for 1, so it makes SELU an ELU."""
    negative = f.multiply(expm1(f, f.multiply(x, float(input_scale))), float(alpha * scale))
    return f.where(f.greater(x, 0.0), f.multiply(x, float(scale)), negative)


def hardtanh(f, x, min_val=-1, max_val=1):
    """TVM's converter takes ±1 for limits that are not given by keyword."""
    return f.minimum(f.maximum(x, min_val), max_val)


def leaky_relu(f, x, negative_slope=0.01):
    return f.context.emit(relax.op.nn.leakyrelu(x, float(negative_slope)))


def gelu(f, x, approximate="none"):
    return f.gelu_tanh(x) if approximate == "tanh" else f.gelu(x)


UNARY = {
    "abs": native("abs"),
    "acos": native("acos", kind="float", half=False),
    "acosh": native("acosh", kind="float", half=False),
    "asin": native("asin", kind="float", half=False),
    "asinh": native("asinh", kind="float", half=False),
    "atan": native("atan", kind="float", half=False),
    "atanh": Elementwise(atanh, "float"),
    "bitwise_not": Elementwise(lambda f, x: f.bitwise_not(x), booleans=lambda f, x: f.bitwise_not(x)),
    "ceil": rounding("ceil"),
    "cos": native("cos", kind="float"),
    "cosh": native("cosh", kind="float", half=False),
    "elu": Elementwise(elu),
    "erf": native("erf", kind="float"),
    "erfc": Elementwise(erfc, "float"),
    "erfinv": Elementwise(erfinv, "float"),
    "exp": native("exp", kind="float"),
    "exp2": Elementwise(lambda f, x: f.power(2.0, x), "float"),
    "expm1": Elementwise(expm1, "float"),
    "floor": rounding("floor"),
    "gelu": Elementwise(gelu, half=True),
    "hardtanh": Elementwise(hardtanh, half=True),
    "isinf": Elementwise(lambda f, x: f.equal(f.abs(x), math.inf) if f.is_float else f.not_equal(x, x), "bool", True),
    "isnan": Elementwise(lambda f, x: f.isnan(x), "bool", True),
    "leaky_relu": Elementwise(leaky_relu, half=True),
    "log": native("log", kind="float"),
    "log10": Elementwise(lambda f, x: f.multiply(f.log(x), math.log10(math.e)), "float"),
    "log1p": Elementwise(log1p, "float"),
    "log2": Elementwise(lambda f, x: f.multiply(f.log(x), math.log2(math.e)), "float"),
    "logical_not": Elementwise(lambda f, x: f.equal(x, 0), "bool", True, booleans=lambda f, x: f.logical_not(x)),
    "neg": Elementwise(lambda f, x: f.subtract(0, x) if f.is_unsigned else f.negative(x), half=True),
    "reciprocal": Elementwise(lambda f, x: f.divide(1.0, x), "float", half=True),
    "relu": native("relu"),
    "round": Elementwise(round_to),
    "rsqrt": native("rsqrt", kind="float"),
    "sigmoid": native("sigmoid", kind="float"),
    "sign": Elementwise(lambda f, x: f.minimum(x, 1) if f.is_unsigned else f.sign(x), half=True),
    "signbit": Elementwise(
        lambda f, x: f.any(f.less(x, 0), f.less(f.divide(1.0, x), 0.0)) if f.is_float else f.less(x, 0), "bool"
    ),
    "sin": native("sin", kind="float"),
    "sinh": native("sinh", kind="float", half=False),
    "sqrt": native("sqrt", kind="float"),
    "tan": native("tan", kind="float", half=False),
    "tanh": native("tanh", kind="float"),
    "trunc": rounding("trunc"),
}
