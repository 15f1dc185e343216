"""Vector arithmetic for CPU kernels, written so that LLVM neither scalarises it nor calls a library.

A vector is an expression of dtype "float32x16" or the like.  Local buffers of such dtypes become registers once
their indices are constants, that is once the loops over them are unrolled.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

LOG2E = 1.4426950408889634
NEG_INF = float("-inf")
# A bias of this or less masks, as in relax_passes (spellings/normal_form.py): a finite score plus it has no weight.
MASKS = -1e30
LARGEST = 3.4028234663852886e38

# 2**f = 1 + c1 f + … + c6 f**6 on [0, 1], minimax (Remez): relative error 2e-9, far below float32 rounding.
_EXP2 = (1.0, 0.6931470632553101, 0.2402293086051941, 0.055485282093286514, 0.009675451554358006, 0.001246784464456141,
         0.0002161292068194598)  # fmt: skip

# (exp(r) - 1 - r) / r**2 by Taylor: the first term left out is below 2**-27 for |r| <= ln(2) / 2.
_EXPM1 = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
# ln(2) in two parts: a whole number below 2**10 times the first is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4


def lanes(target) -> int:
    """float32 elements of a vector register of an LLVM target: 16 with AVX-512, 8 with AVX, else 4."""
    # Not llvm_get_vector_width, which says 512 bits for every x86 target where the compiling machine has AVX-512.
    features = tvm.target.codegen.llvm_cpu_has_features
    return 16 if features("avx512f", target) else 8 if features("avx", target) else 4


def registers(target) -> int:
    """Vector registers of an LLVM target: 32 with AVX-512 and on AArch64, else 16."""
    triple = str(target.attrs.get("mtriple", "")) or tvm.target.codegen.llvm_get_system_triple()
    return 32 if lanes(target) == 16 or triple.startswith(("aarch64", "arm64")) else 16


def splat(value, width: int):
    """`width` equal elements."""
    value = T.float32(value) if isinstance(value, float) else value
    return value if width == 1 else T.broadcast(value, width)


def span(start, size: int):
    """The index of `size` consecutive elements."""
    return start if size == 1 else T.ramp(start, 1, size)


def pieces(length: int, width: int) -> list[tuple[int, int]]:
    """(start, size) of the vectors that cover a row: first those of the full width, then smaller powers of two."""
    found, start = [], 0
    while start < length:
        while start + width > length:
            width //= 2
        found.append((start, width))
        start += width
    return found


def bind(value, body):
    """`body(x)` with x bound to `value`: x may occur many times and is computed once.

    `value` must not convert from bfloat16: TVM 0.27 overlooks such casts inside a binding and computes nonsense.
    """
    var = tirx.Var("x", value.ty)
    return tirx.Let(var, value, body(var))


def vector(elements):
    """A vector of scalar expressions."""
    return tirx.Shuffle(list(elements), list(range(len(elements))))


def element(x, lane: int):
    """One element of a vector, as a scalar."""
    return tirx.Shuffle([x], [lane])


def exp2(x, width: int):
    """2**x of a float32 vector with x <= 0: relative error 1e-7, 0 below -126 and for -inf, NaN for NaN."""

    def scaled(whole):
        def polynomial(fraction):
            value = splat(_EXP2[-1], width)
            for coefficient in _EXP2[-2::-1]:
                value = value * fraction + splat(coefficient, width)
            return value

        exponent = (T.cast(whole, f"int32x{width}") + T.broadcast(127, width)) << T.broadcast(23, width)
        return bind(x - whole, polynomial) * T.reinterpret(f"float32x{width}", exponent)

    # The clamp keeps the conversion to int32 defined; results for clamped x are replaced by 0.
    value = bind(T.floor(T.max(x, splat(-127.0, width))), scaled)
    return T.Select(x < splat(-126.0, width), splat(0.0, width), value)


def tanh(x, width: int):
    """The hyperbolic tangent of a float32 vector: relative error 2e-7, also near 0; ±1 for ±inf, NaN for NaN.

    With e = exp(2x) - 1 it is e / (e + 2).  For 2x = n ln(2) + r, e is 2**n (exp(r) - 1) + (2**n - 1), and nothing
    cancels for n = 0.  The expression `x` occurs several times in the result.
    """

    def quotient(e):
        return e / (e + splat(2.0, width))

    def combined(n, r):
        exponent = (T.cast(n, f"int32x{width}") + T.broadcast(127, width)) << T.broadcast(23, width)
        value = splat(_EXPM1[-1], width)
        for coefficient in _EXPM1[-2::-1]:
            value = value * r + splat(coefficient, width)
        return bind(
            T.reinterpret(f"float32x{width}", exponent),
            lambda power: bind(power * (r + r * r * value) + (power - splat(1.0, width)), quotient),
        )

    def reduced(n, clamped):
        return bind(clamped - n * splat(LN2_HIGH, width) - n * splat(LN2_LOW, width), lambda r: combined(n, r))

    # Beyond ±10 the result is ±1.  The clamp of the exponent loses a NaN, which keeps its conversion to int32 defined,
    # and the one of the argument keeps it.
    high, low = splat(10.0, width), splat(-10.0, width)
    limited = T.min(T.max(x, low), high) * splat(2 * LOG2E, width) + splat(0.5, width)
    clamped = T.Select(x > high, high, T.Select(x < low, low, x)) * splat(2.0, width)
    return bind(T.floor(limited), lambda n: bind(clamped, lambda y: reduced(n, y)))


def biased(score, bias, width: int):
    """score + bias; only the bias if it is MASKS or less (it masks the score) and the score is NaN or infinite.

    The expression `score` occurs several times in the result.
    """
    masked = T.Select(T.abs(score) <= splat(LARGEST, width), score + bias, bias)
    return T.Select(bias <= splat(MASKS, width), masked, score + bias)


def horizontal_sum(x, width: int):
    """The sum of a vector's elements."""
    return _fold(x, width, lambda y, z: y + z)


def horizontal_max(x, width: int):
    """The largest of a vector's elements."""
    return _fold(x, width, T.max)


def _fold(x, width: int, combine):
    while width > 1:
        width //= 2
        low, high = list(range(width)), list(range(width, 2 * width))
        x = bind(x, lambda y, low=low, high=high: combine(tirx.Shuffle([y], low), tirx.Shuffle([y], high)))
    return x


def interleave(x, y, width: int, high: bool):
    """The low or high halves of two vectors, alternating: x0 y0 x1 y1 …"""
    start = width // 2 if high else 0
    return tirx.Shuffle([x, y], [start + lane // 2 + lane % 2 * width for lane in range(width)])


@T.inline
def transpose(x, y, width):
    """Transpose the width × width matrix whose rows are the vectors of local buffer x, in place; y is scratch.

    Each of log2(width) rounds interleaves row r with row r + width/2, which rotates the bits of every position by one.
    """
    for _ in T.unroll(width.bit_length() - 1):
        for r in T.unroll(width // 2):
            y[2 * r] = interleave(x[r], x[r + width // 2], width, False)
            y[2 * r + 1] = interleave(x[r], x[r + width // 2], width, True)
        for r in T.unroll(width):
            x[r] = y[r]


def log_sum_exp(top, total, exp_scale: float):
    """Natural logarithm of a softmax's denominator, -inf if it is 0; `total` sums exp2((x - top) * exp_scale)."""
    return T.Select(total == T.float32(0), T.float32(NEG_INF), top * T.float32(exp_scale / LOG2E) + T.log(total))


def _finite(top):
    """`top`, or 0 for the maximum of a row that kept nothing: -inf - -inf would be NaN."""
    zero, minus_infinity = (tirx.const(x, top.ty.dtype) for x in (0.0, NEG_INF))
    return T.Select(top == minus_infinity, zero, top)


@T.inline
def add_sink(top, total, factor, logit, i, sink, exponential):
    """Add a sink to softmax i, whose total[i] is the sum of exp(x - top[i]); all logarithms are natural.

    The exponent is taken from the larger of maximum and sink, so neither overflows.  `factor` receives the scale of the
    outputs before they are divided by the total, `logit` the sink.  `exponential` computes exp of an argument of at
    most 0, in top's dtype.
    """
    logit[i] = sink  # stored first: see `bind`
    factor[i] = top[i]
    top[i] = T.max(top[i], logit[i])
    total[i] = total[i] * exponential(factor[i] - _finite(top[i])) + exponential(logit[i] - _finite(top[i]))
    factor[i] = exponential(factor[i] - _finite(top[i]))


def without_parameters(function, names: list[str]):
    """A PrimFunc without the parameters called `names`, which its body does not use."""
    params = [p for p in function.params if p.name not in names]
    return tirx.PrimFunc(params, function.body, function.ret_type, function.attrs)


def whole(buffer):
    """All of a buffer, for `T.reads` and `T.writes`: which elements are read depends on data."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]
