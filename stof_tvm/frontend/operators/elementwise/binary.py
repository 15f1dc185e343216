"""Elementwise operators of two tensors, or of a tensor and a number, as PyTorch defines them."""

import math

from tvm.ir.expr import GenericConst

from relax_passes.ir.formulas.log_add_exp import emit_log_add_exp
from stof_tvm.frontend.operators.elementwise.formulas import HALF, Formulas
from stof_tvm.frontend.operators.elementwise.promotion import Elementwise
from tir_kernels.errors import UnsupportedError

LARGEST_CHAIN = 32  # powers up to this one are products


def native(name, **options) -> Elementwise:
    """The Relax operator that means the same."""
    return Elementwise(lambda f, x, y: getattr(f, name)(x, y), **{"half": True, **options})


def add(f, x, y, alpha=1):
    return f.add(x, _scaled(f, y, alpha))


def subtract(f, x, y, alpha=1):
    return f.subtract(x, _scaled(f, y, alpha))


def reverse_subtract(f, x, y, alpha=1):
    return f.subtract(y, _scaled(f, x, alpha))


def multiply(f, x, y):
    """A product with the constant 0 becomes x - x, which is NaN for NaN and infinities; TVM takes 0 * x for 0."""
    for value, other in ((x, y), (y, x)):
        if f.is_float and _number(other) == 0:
            return f.subtract(value, value)
    return f.multiply(x, y)


def _scaled(f, x, alpha):
    return x if alpha == 1 else f.multiply(x, alpha)


def divide_rounded(f, x, y, rounding_mode):
    if rounding_mode is None:
        f = f if f.is_float else Formulas(f.context, "float32")
        return f.divide(f.cast(x, f.dtype), f.cast(y, f.dtype))
    if rounding_mode == "floor":
        return floor_divide(f, x, y)
    if f.is_float:  # divided by a tensor, the quotient is rounded to the result's dtype before truncation
        quotient = f.divide(x, y)
        return f.trunc(f.cast(quotient, f.context.dtype) if y.ty.shape else quotient)
    y = _divisor(f, y)
    return f.floor_divide(f.subtract(x, f.mod(x, y)), y)


def floor_divide(f, x, y):
    """The floor of the quotient; for floats as in Python, exact even where x/y rounds to the next whole number."""
    if not f.is_float:
        return f.floor_divide(x, _divisor(f, y))
    rest = f.mod(x, y)
    quotient = f.divide(f.subtract(x, rest), y)
    quotient = f.where(_other_sign(f, rest, y), f.subtract(quotient, 1.0), quotient)
    whole = f.floor(quotient)
    whole = f.where(f.greater(f.subtract(quotient, whole), 0.5), f.add(whole, 1.0), whole)
    whole = f.where(f.equal(quotient, 0.0), f.multiply(f.divide(x, y), 0.0), whole)
    return f.where(f.equal(y, 0.0), f.divide(x, y), whole)


def remainder(f, x, y):
    """The remainder with the divisor's sign; TVM's for floats is x - floor(x/y) y, which is NaN for an infinite y."""
    if not f.is_float:
        return f.floor_mod(x, _divisor(f, y))
    rest = f.mod(x, y)
    return f.where(_other_sign(f, rest, y), f.add(rest, y), rest)


def truncated_remainder(f, x, y):
    return f.mod(x, y if f.is_float else _divisor(f, y))


def _other_sign(f, rest, y):
    """Whether a remainder that is not 0 has another sign than the divisor."""
    negative = f.logical_xor(f.less(rest, 0.0), f.less(y, 0.0))
    return f.all(f.not_equal(rest, 0.0), negative)


def _divisor(f, y):
    """An integer divisor; a tensor's zeros become ones, because a division by zero ends the process."""
    if isinstance(y, GenericConst):
        if not y.value.numpy().all():
            raise UnsupportedError("an integer divided by a constant that is 0")
        return y
    return f.where(f.equal(y, 0), f.operand(1), y)


def power(f, x, exponent):
    """Products where the exponent is a small whole number: a GPU's pow is NaN for a negative base."""
    number = _number(exponent)
    is_whole = number is not None and math.isfinite(number) and number == int(number)
    if is_whole and not f.is_float and number < 0:
        raise UnsupportedError(f"an integer to the negative power {number}")
    if is_whole and not (f.is_float and abs(number) > LARGEST_CHAIN):
        product = _chain(f, x, abs(int(number)))
        return f.divide(1.0, product) if number < 0 else product
    if number == 0.5:
        return f.sqrt(x)
    if number == -0.5:
        return f.rsqrt(x)
    if not f.is_float:
        return _power_int(f, x, exponent)
    wide = Formulas(f.context, "float32" if f.dtype in HALF else f.dtype)
    return _power_float(wide, *(_widened(wide, value) for value in (x, exponent)))


def _widened(f, x):
    number = _number(x)
    return f.cast(x, f.dtype) if number is None else f.operand(number)


def _number(x):
    """The number of a constant of no dimensions, None for anything else."""
    return x.value.numpy().item() if isinstance(x, GenericConst) and x.value.numpy().ndim == 0 else None


def _chain(f, x, exponent: int):
    """x to a whole power by squaring."""
    if exponent == 0:
        return f.ones_like(x)
    if exponent <= 4:
        result = x
        for _ in range(exponent - 1):
            result = f.multiply(result, x)
        return result
    result = None
    while exponent:
        if exponent & 1:
            result = x if result is None else f.multiply(result, x)
        exponent >>= 1
        x = f.multiply(x, x) if exponent else x
    return result


def _power_float(f, x, y):
    """|x| to the power y; for a negative x, negated where y is odd, and NaN where y is a fraction and x finite."""
    base = _number(x)
    size = f.power(x if base is not None and base > 0 else f.abs(x), y)
    if base is not None and base > 0:
        return size
    odd = f.equal(f.abs(f.mod(y, 2.0)), 1.0)
    below = f.any(f.less(x, 0.0), f.less(f.divide(1.0, x), 0.0))  # -0.0, too
    signed = f.where(f.all(odd, below), f.negative(size), size)
    finite = f.all(f.less(x, 0.0), f.greater(x, -math.inf))
    return f.where(f.all(finite, f.not_equal(f.floor(y), y)), f.operand(math.nan), signed)


def _power_int(f, x, y):
    """A base that is a power of two becomes a shift.  Others would take a product for each bit of the exponent."""
    base = _number(x)
    if base is None or base < 1 or base & (base - 1):
        raise UnsupportedError("integers to the power of a tensor of integers; cast them to floats")
    return shift_left(f, f.operand(1), f.multiply(y, base.bit_length() - 1))


def shift_left(f, x, y):
    outside = f.any(f.less(y, 0), f.greater_equal(y, f.bits))
    return f.where(outside, f.operand(0), f.left_shift(x, f.where(outside, f.operand(0), y)))


def shift_right(f, x, y):
    """A shift outside 0 … bits - 1 gives what a shift of all bits leaves, 0 or -1."""
    outside = f.any(f.less(y, 0), f.greater_equal(y, f.bits))
    last = f.operand(f.bits - 1)
    shifted = f.right_shift(x, f.where(outside, last, y))
    return f.where(outside, f.operand(0), shifted) if f.is_unsigned else shifted


def not_nan(operator):
    """fmax or fmin: the other operand where one is NaN."""

    def compute(f, x, y):
        if not f.is_float:
            return getattr(f, operator)(x, y)
        larger = getattr(f, operator)(x, y)
        return f.where(f.isnan(x), y, f.where(f.isnan(y), x, larger))

    return compute


def hypot(f, x, y):
    """Scaled by the larger of the two, whose square may overflow."""
    x, y = f.abs(x), f.abs(y)
    large, small = f.maximum(x, y), f.minimum(x, y)
    ratio = f.where(f.equal(large, 0.0), f.operand(0.0), f.divide(small, large))
    length = f.multiply(large, f.sqrt(f.add(1.0, f.multiply(ratio, ratio))))
    is_infinite = f.any(f.equal(x, math.inf), f.equal(y, math.inf))
    return f.where(is_infinite, f.operand(math.inf), length)


def copysign(f, x, y):
    negative = f.any(f.less(y, 0.0), f.less(f.divide(1.0, y), 0.0))
    size = f.abs(x)
    return f.where(negative, f.negative(size), size)


def logical(name) -> Elementwise:
    def compute(f, x, y):
        return getattr(f, name)(f.cast(x, "bool"), f.cast(y, "bool"))

    return Elementwise(compute, "bool", half=True, booleans=compute)


def bitwise(name) -> Elementwise:
    compute = lambda f, x, y: getattr(f, name)(x, y)
    return Elementwise(compute, booleans=compute)


def comparison(name) -> Elementwise:
    return native(name, kind="bool")


_either = lambda f, x, y, alpha=1: f.logical_or(x, y) if alpha else x
_both = lambda f, x, y: f.logical_and(x, y)


def _refused_power(f, x, y):
    raise UnsupportedError("the power of booleans")


BINARY = {
    "add": Elementwise(add, half=True, booleans=_either),
    "atan2": Elementwise(lambda f, x, y: f.atan2(x, y), "float"),
    "bitwise_and": bitwise("bitwise_and"),
    "bitwise_left_shift": Elementwise(shift_left),
    "bitwise_or": bitwise("bitwise_or"),
    "bitwise_right_shift": Elementwise(shift_right),
    "bitwise_xor": bitwise("bitwise_xor"),
    "__and__": bitwise("bitwise_and"),
    "__lshift__": Elementwise(shift_left),
    "__or__": bitwise("bitwise_or"),
    "__rshift__": Elementwise(shift_right),
    "__xor__": bitwise("bitwise_xor"),
    "copysign": Elementwise(copysign, "float"),
    "div.Tensor": native("divide", kind="float"),
    "div.Scalar": native("divide", kind="float"),
    "div.Tensor_mode": Elementwise(divide_rounded, exact_numbers=True),
    "div.Scalar_mode": Elementwise(divide_rounded, exact_numbers=True),
    "eq": comparison("equal"),
    "floor_divide": Elementwise(floor_divide, exact_numbers=True),
    "fmax": Elementwise(not_nan("maximum"), half=True),
    "fmin": Elementwise(not_nan("minimum"), half=True),
    "fmod": Elementwise(truncated_remainder),
    "ge": comparison("greater_equal"),
    "gt": comparison("greater"),
    "hypot": Elementwise(hypot, "float"),
    "le": comparison("less_equal"),
    "logaddexp.default": Elementwise(lambda f, x, y: emit_log_add_exp(f.context.emit, x, y), "float"),
    "logical_and": logical("logical_and"),
    "logical_or": logical("logical_or"),
    "logical_xor": logical("logical_xor"),
    "lt": comparison("less"),
    "max.other": native("maximum"),
    "maximum": native("maximum"),
    "min.other": native("minimum"),
    "minimum": native("minimum"),
    "mul": Elementwise(multiply, half=True, booleans=_both),
    "ne": comparison("not_equal"),
    "pow": Elementwise(power, half=True, booleans=_refused_power),
    "remainder": Elementwise(remainder),
    "rsub": Elementwise(reverse_subtract, half=True),
    "sub": Elementwise(subtract, half=True),
}
