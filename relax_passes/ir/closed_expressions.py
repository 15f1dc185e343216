"""Expressions that depend on no input of the function."""

from collections.abc import Collection

from tvm import relax

from relax_passes.ir.bindings import Bindings, operator, static_shape


class ClosedExpressions:
    """Tells which expressions of a function depend on constants only.

    `known` are variables that count as constants although they have no values.
    """

    def __init__(self, bindings: Bindings, known: Collection[relax.Var] = ()):
        self.closed_vars = set(known)
        for var, value in bindings.values.items():
            # What it reads is asked first: most variables depend on an input, and the other questions cost more.
            if all(read in self.closed_vars for read in bindings.reads[var]) and _is_pure(value) and _is_static(var):
                self.closed_vars.add(var)

    def is_closed(self, expr) -> bool:
        """Whether `expr`, written in variables of the function, depends on constants only."""
        if isinstance(expr, relax.Var):
            return expr in self.closed_vars
        return _is_pure(expr) and all(var in self.closed_vars for var in relax.analysis.free_vars(expr))


def _is_static(var) -> bool:
    return isinstance(var.ty, relax.TupleType) or static_shape(var) is not None


def _is_pure(expr) -> bool:
    """Whether `expr` is no call but one of a pure operator, which no kernel computes."""
    if not isinstance(expr, relax.Call):
        return True
    name = operator(expr)
    return bool(name and expr.op.get_attr("FPurity")) and not name.startswith("call_")
