"""Recognition of the formulas that are written for operators that Relax lacks."""

from collections.abc import Callable

import tvm_ffi
from tvm import relax

from relax_passes.ir.bindings import Bindings, operator


def is_written_as(bindings: Bindings, expr, formula: Callable, *operands: relax.Expr) -> bool:
    """Whether `expr` is what `formula(emit, *operands)` writes."""
    written = {}

    def emit(value):
        var = relax.Var(f"v{len(written)}", operands[0].ty)  # any type will do: nothing reads it
        written[var] = value
        return var

    params = [relax.Var(f"x{i}", x.ty) for i, x in enumerate(operands)]
    return _is_alike(bindings, expr, formula(emit, *params), written, dict(zip(params, operands)))


def _is_alike(bindings, expr, expected, written, given) -> bool:
    """Whether `expr` computes the same as `expected`, operator by operator."""
    if expected in given:
        return bindings.value(expr).same_as(bindings.value(given[expected]))
    value, expected = bindings.value(expr), written.get(expected, expected)
    if isinstance(expected, relax.Call):
        if not operator(value) or not value.op.same_as(expected.op) or len(value.args) != len(expected.args):
            return False
        pairs = zip(value.args, expected.args)
        return all(_is_alike(bindings, a, b, written, given) for a, b in pairs)
    return tvm_ffi.structural_equal(value, expected)
