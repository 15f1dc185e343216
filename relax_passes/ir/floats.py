"""Floating-point dtypes: what each keeps of another, and numbers that TVM's simplifier knows nothing of."""

from tvm import tirx

# (bits of precision, largest exponent): a cast keeps what a dtype was born with if neither shrinks.
FLOATS = {"bfloat16": (8, 127), "float16": (11, 15), "float32": (24, 127), "float64": (53, 1023)}
HALVES = ("float16", "bfloat16")
BITS = {"float32": "int32", "float64": "int64"}  # the integers of as many bits, of those that every target reinterprets


def keeps_precision(dtype: str, born: str) -> bool:
    """Whether numbers computed in `born` lose nothing in `dtype`; neither is narrower for those that are no floats."""
    if dtype not in FLOATS or born not in FLOATS:
        return False
    return all(a >= b for a, b in zip(FLOATS[dtype], FLOATS[born]))


def opaque(x):
    """x itself, a TensorIR expression of a float dtype, of which the simplifier knows nothing."""
    dtype = str(x.ty.dtype)
    if dtype in HALVES:  # through float32, which every target reinterprets, and which has all their numbers
        return opaque(x.astype("float32")).astype(dtype)
    return tirx.reinterpret(dtype, tirx.reinterpret(BITS[dtype], x))
