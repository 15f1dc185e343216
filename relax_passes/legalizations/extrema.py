"""relu, clip, maximum, minimum, max, min, argmax and argmin of floats that keep NaN, as PyTorch's do.

TVM's `max(a, b)` is `a > b ? a : b` on LLVM and `fmax` in CUDA: the first keeps a NaN of one operand only, the second
of neither.  Elementwise operators are written as comparisons here, which are false for NaN.  Reductions reduce integer
keys in the order of the floats, with NaN beyond every number: so TVM's schedules recognise them, in vectors and across
threads.

    key(x) = bits(x) if x >= 0, its other bits flipped if x < 0, the largest (or least) integer if x is NaN
"""

import functools
import math

from tvm import relax, te, tirx
from tvm.ir.expr import GenericConst

INFINITY_BITS = {"float32": 0x7F800000, "float64": 0x7FF0000000000000}
FLOATS = ("float16", "bfloat16", "float32", "float64")


def keeps_nan(legalize):
    """`legalize` for calls whose first operand is a float, and TVM's own legalization for other calls."""

    @functools.wraps(legalize)
    def legalize_call(builder, call):
        if str(call.args[0].ty.dtype) not in FLOATS:
            return call.op.get_attr("FLegalize")(builder, call)
        return legalize(builder, call)

    return legalize_call


# -- elementwise ---------------------------------------------------------------------------------------------------


def at_least(x, low):
    """x, or `low` where x is less."""
    return tirx.Select(x < low, low, x)


def at_most(x, high):
    """x, or `high` where x is more."""
    return tirx.Select(x > high, high, x)


def larger(a, b):
    """The larger of two, NaN if either is."""
    return tirx.Select(tirx.any(_is_nan(a), a > b), a, b)


def smaller(a, b):
    """The smaller of two, NaN if either is."""
    return tirx.Select(tirx.any(_is_nan(a), a < b), a, b)


def _is_nan(x):
    dtype = str(x.ty.dtype)
    return tirx.isnan(x.astype("float32") if dtype in ("float16", "bfloat16") else x)


@keeps_nan
def legalize_relu(builder, call):
    """x, or 0 where x is less."""
    return _emit_map(builder, call, "relu", lambda x: at_least(x, tirx.const(0, str(x.ty.dtype))))


@keeps_nan
def legalize_relu6(builder, call):
    """x between 0 and 6."""
    six = lambda x: at_most(at_least(x, tirx.const(0, str(x.ty.dtype))), tirx.const(6, str(x.ty.dtype)))
    return _emit_map(builder, call, "relu6", six)


@keeps_nan
def legalize_clip(builder, call):
    """x between two numbers."""
    low, high = (float(bound.value) for bound in call.args[1:])

    def clip(x):
        bounds = (tirx.const(bound, str(x.ty.dtype)) for bound in (low, high))
        return at_most(at_least(x, next(bounds)), next(bounds))

    return _emit_map(builder, call, "clip", clip)


def _emit_map(builder, call, name: str, function):
    compute = lambda x: te.compute(x.shape, lambda *index: function(x(*index)), name=name)
    return builder.call_te(compute, call.args[0], primfunc_name_hint=name)


def _legalize_pair(name: str, choose):
    @keeps_nan
    def legalize(builder, call):
        shape = call.ty.shape

        def compute(*tensors):
            given = iter(tensors)
            read = [_reader(next(given) if number is None else number, shape) for number in numbers]
            return te.compute(shape, lambda *index: choose(*(element(index) for element in read)), name=name)

        numbers = [constant_number(operand) for operand in call.args]
        tensors = [operand for operand, number in zip(call.args, numbers) if number is None]
        if not tensors:
            numbers[0], tensors = None, [call.args[0]]
        return builder.call_te(compute, *tensors, primfunc_name_hint=name)

    return legalize


def constant_number(operand):
    """The number that a constant without dimensions is; None for any other operand."""
    is_number = isinstance(operand, GenericConst) and len(operand.ty.shape) == 0
    return tirx.const(operand.value.numpy().item(), str(operand.ty.dtype)) if is_number else None


def _reader(operand, shape):
    """A function from an index of the result to the broadcast operand's element there; a number gives itself."""
    if not isinstance(operand, te.Tensor):
        return lambda index: operand
    lead = len(shape) - len(operand.shape)
    is_one = [isinstance(size, tirx.IntImm) and int(size) == 1 for size in operand.shape]
    return lambda index: operand(*(tirx.const(0, "int64") if one else i for one, i in zip(is_one, index[lead:])))


# -- reductions ----------------------------------------------------------------------------------------------------


def _legalize_reduction(operator, is_largest: bool, gives_value: bool):
    """A legalization that reduces keys; with `gives_value` the resulting keys are turned back into floats."""

    @keeps_nan
    def legalize(builder, call):
        (x, dtype), attrs = (call.args[0], str(call.args[0].ty.dtype)), call.attrs
        keys = builder.emit(_emit_keys(builder, x, is_largest, not gives_value))
        reduced = builder.normalize(operator(keys, attrs.axis, attrs.keepdims))
        reduced = reduced.op.get_attr("FLegalize")(builder, reduced)
        if not gives_value:
            return reduced
        back = lambda key: te.compute(key.shape, lambda *i: float_of(key(*i)).astype(dtype), name="float_of")
        return builder.call_te(back, builder.emit(reduced), primfunc_name_hint="float_of")

    return legalize


def _emit_keys(builder, x, is_largest: bool, zeros_are_equal: bool):
    key = functools.partial(key_of, nan_is_largest=is_largest, zeros_are_equal=zeros_are_equal)
    compute = lambda x: te.compute(x.shape, lambda *index: key(x(*index)), name="key_of")
    return builder.call_te(compute, x, primfunc_name_hint="key_of")


def key_of(x, nan_is_largest: bool, zeros_are_equal: bool = False):
    """An integer of at least 32 bits in the order of the floats; NaN is the largest of all, or the least.

    With `zeros_are_equal`, -0.0 has the key of 0.0, so that argmax and argmin find the first zero.  Such keys cannot be
    turned back into floats.
    """
    x = x if str(x.ty.dtype) in INFINITY_BITS else x.astype("float32")
    dtype = "int64" if str(x.ty.dtype) == "float64" else "int32"
    most = tirx.max_value(dtype)
    bits = tirx.reinterpret(dtype, x)
    key = tirx.Select(bits < 0, tirx.min_value(dtype) - bits, bits) if zeros_are_equal else _flipped(bits)
    return tirx.Select(tirx.isnan(x), most if nan_is_largest else -most, key)


def float_of(key):
    """The float of a key, float64 for 64 bits.  Keys of NaN give the usual NaN, which casts keep."""
    dtype = "float64" if str(key.ty.dtype) == "int64" else "float32"
    infinity = tirx.const(INFINITY_BITS[dtype], str(key.ty.dtype))
    is_nan = tirx.any(key > infinity, key < -1 - infinity)
    return tirx.Select(is_nan, tirx.const(math.nan, dtype), tirx.reinterpret(dtype, _flipped(key)))


def _flipped(bits):
    """`bits` with all but the sign flipped where the sign is set; this is its own inverse."""
    dtype = str(bits.ty.dtype)
    return tirx.Select(bits < 0, bits ^ tirx.max_value(dtype), bits)


EXTREMA = {
    "relax.nn.relu": legalize_relu,
    "relax.nn.relu6": legalize_relu6,
    "relax.clip": legalize_clip,
    "relax.maximum": _legalize_pair("maximum", larger),
    "relax.minimum": _legalize_pair("minimum", smaller),
    "relax.max": _legalize_reduction(relax.op.max, True, True),
    "relax.min": _legalize_reduction(relax.op.min, False, True),
    "relax.argmax": _legalize_reduction(relax.op.argmax, True, False),
    "relax.argmin": _legalize_reduction(relax.op.argmin, False, False),
}
