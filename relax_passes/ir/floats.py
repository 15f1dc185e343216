"""Floating-point dtypes: which casts lose nothing, and expressions that TVM's simplifier cannot see through."""

from tvm import tirx

# (bits of precision, largest exponent): a cast loses nothing if neither shrinks.
FLOATS = {"bfloat16": (8, 127), "float16": (11, 15), "float32": (24, 127), "float64": (53, 1023)}
# The distance from 1 to the next number.
EPSILON = {dtype: 2.0 ** (1 - bits) for dtype, (bits, _) in FLOATS.items()}
HALVES = ("float16", "bfloat16")
BITS = {"float32": "int32", "float64": "int64"}  # integers of the same size; every target can reinterpret these dtypes


def keeps_precision(dtype: str, source_dtype: str) -> bool:
    """Whether numbers computed in `source_dtype` lose nothing in `dtype`; False if either is not in `FLOATS`."""
    if dtype not in FLOATS or source_dtype not in FLOATS:
        return False
    return all(a >= b for a, b in zip(FLOATS[dtype], FLOATS[source_dtype]))


def opaque(x):
    """The value of x, a TensorIR expression of a float dtype, in a form that the simplifier cannot see through."""
    dtype = str(x.ty.dtype)
    if dtype in HALVES:  # through float32, which every target can reinterpret, and which holds all their numbers
        return opaque(x.astype("float32")).astype(dtype)
    return tirx.reinterpret(dtype, tirx.reinterpret(BITS[dtype], x))
