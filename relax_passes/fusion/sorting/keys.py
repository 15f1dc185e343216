"""What a sort really sorts: the elements whose order is that of its operand.

A model's floats are sorted as keys in a wider dtype that hold no NaN, because TVM takes NaN for any number:

    where(isnan(x), inf, minimum(x, the largest finite number))        x may be a cast from a narrower dtype

Kernels of this project sort x itself, and take NaN for the largest number, as PyTorch does.
"""

import math

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, static_shape


def sorted_elements(bindings: Bindings, expr) -> relax.Expr:
    """`expr`, or the expression of the same shape that `expr` has keys, or exact casts, of."""
    while True:
        inner = _before_exact_cast(bindings, expr)
        inner = _before_key(bindings, expr) if inner is None else inner
        if inner is None:
            return expr
        expr = inner


def _before_exact_cast(bindings: Bindings, expr):
    """The operand of a cast to a dtype that has all of its values."""
    cast = bindings.call(expr, "astype")
    return cast.args[0] if cast is not None and _holds(dtype_of(expr), dtype_of(cast.args[0])) else None


def _holds(wide: str, narrow: str) -> bool:
    if narrow == "bfloat16":  # of which NumPy knows no casts
        return wide in ("float32", "float64")
    if "int" in narrow and "float" in wide and wide != "bfloat16":  # NumPy takes float64 for all of int64
        return bool(np.iinfo(narrow).bits <= np.finfo(wide).nmant + 1)
    return wide != "bfloat16" and np.can_cast(narrow, wide, "safe")


def _before_key(bindings: Bindings, expr):
    """x of where(isnan(x), inf, minimum(x, limit))."""
    choice = bindings.call(expr, "where")
    if choice is None or dtype_of(expr) not in ("float32", "float64") or bindings.scalar(choice.args[1]) != math.inf:
        return None
    missing, bounded = bindings.call(choice.args[0], "isnan"), bindings.call(choice.args[2], "minimum")
    if missing is None or bounded is None:
        return None
    for x, limit in (tuple(bounded.args), tuple(reversed(bounded.args))):
        is_largest = bindings.scalar(limit) == float(np.finfo(dtype_of(expr)).max)
        if is_largest and static_shape(x) == static_shape(expr) and missing.args[0].same_as(x):
            return x
    return None
