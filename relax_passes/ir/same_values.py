"""Proofs that two expressions of a function hold the same numbers, however they are reshaped or cast."""

import tvm_ffi
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, operator, static_shape
from relax_passes.ir.floats import FLOATS, keeps_precision


def bare(bindings: Bindings, expr):
    """`expr` before reshapes."""
    while (inner := bindings.same_elements(expr)) is not None:
        expr = inner
    return expr


def uncast(bindings: Bindings, expr):
    """`expr` before casts among floats, which keep the order of numbers."""
    while (call := bindings.call(expr, "astype")) is not None and {dtype_of(call), dtype_of(call.args[0])} <= {*FLOATS}:
        expr = call.args[0]
    return expr


def narrowest(bindings: Bindings, expr):
    """`expr` before casts among floats that lose nothing."""
    while (call := bindings.call(expr, "astype")) is not None and keeps_precision(
        dtype_of(call), dtype_of(call.args[0])
    ):
        expr = call.args[0]
    return expr


def as_precise(bindings: Bindings, expr, dtype: str):
    """`expr` before reshapes, and before casts among floats that are not narrower than `dtype`."""
    while True:
        expr = bare(bindings, expr)
        call = bindings.call(expr, "astype")
        if call is None or not keeps_precision(dtype_of(call), dtype) or dtype_of(call.args[0]) not in FLOATS:
            return expr
        expr = call.args[0]


def same(bindings: Bindings, a, b, depth: int = 12) -> bool:
    """Whether two expressions are bound to the same value, or to the same operators of the same values."""
    a, b = bindings.value(a), bindings.value(b)
    if a.same_as(b):
        return True
    if not depth or not operator(a) or operator(a) != operator(b) or static_shape(a) != static_shape(b):
        return False
    if len(a.args) != len(b.args) or not tvm_ffi.structural_equal(a.attrs, b.attrs):
        return False
    return all(same(bindings, x, y, depth - 1) or _is_equal(x, y) for x, y in zip(a.args, b.args))


def _is_equal(a, b) -> bool:
    """Whether two constants, or two shapes, are equal."""
    return not relax.analysis.free_vars(a) and not operator(a) and tvm_ffi.structural_equal(a, b)


def same_numbers(bindings: Bindings, a, b) -> bool:
    """Whether `same` holds before casts among floats."""
    return same(bindings, uncast(bindings, a), uncast(bindings, b))
