"""Functions of float32 that are right to its accuracy, made of what fast math leaves exact enough.

With --use_fast_math, tanhf is an instruction with 11 bits and expf loses bits of large arguments; 2^x and division keep
all but two, and erff all but one.
"""

import math

from tvm.script import tirx as T

LOG2E = math.log2(math.e)
NEAR_ZERO = 0.55  # below which tanh is a polynomial
# (tanh(x) / x - 1) / x² as a polynomial of x², highest power first: a least-squares fit for |x| up to NEAR_ZERO.  The
# relative error of tanh is then 7e-8, with its roundings.
TANH = (-0.006282438058406115, 0.021077735349535942, -0.053853850811719894, 0.13332602381706238, -0.33333319425582886)


def logistic(x, factor: float = 1.0):
    """1 / (1 + exp(-factor x)); exact in both tails."""
    return T.float32(1) / (T.float32(1) + T.exp2(x * T.float32(-LOG2E * factor)))


def tanh(x):
    """The hyperbolic tangent of an expression, which is repeated."""
    square = x * x
    series = T.float32(TANH[0])
    for coefficient in TANH[1:]:
        series = series * square + T.float32(coefficient)
    large = T.float32(1) - T.float32(2) * logistic(T.abs(x), -2.0)
    signed = T.Select(x < T.float32(0), T.float32(0) - large, large)
    return T.Select(T.abs(x) < T.float32(NEAR_ZERO), x + x * (square * series), signed)


def gelu(x):
    """The exact GELU of an expression, which is repeated: PyTorch's formula."""
    return x * T.float32(0.5) * (T.float32(1) + T.erf(x * T.float32(math.sqrt(0.5))))
