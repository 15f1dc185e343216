"""Which variables of a function with explicit outputs are of one memory, and which calls read or write it."""

from tvm import relax

from relax_passes.ir.bindings import operator

ALLOCATION = "builtin.alloc_tensor"


def memory_of(var: relax.Var, values: dict) -> relax.Var:
    """The variable whose memory another name or a view is of."""
    while (value := values.get(var)) is not None:
        inner = value.args[0] if operator(value) == "reshape" else value
        if not isinstance(inner, relax.Var):
            return var
        var = inner
    return var


def calls_on(bindings: list, values: dict) -> dict[relax.Var, list[int]]:
    """The numbers of the bindings that read or write each memory, ascending; other names and views not counted."""
    found: dict[relax.Var, list[int]] = {}
    for number, binding in enumerate(bindings):
        if isinstance(binding.value, relax.Call) and operator(binding.value) not in ("reshape", ALLOCATION):
            for memory in {memory_of(var, values) for var in relax.analysis.free_vars(binding.value)}:
                found.setdefault(memory, []).append(number)
    return found


def results_of(expr, values: dict) -> list[relax.Var]:
    """The variables of a function's results, each field of a tuple."""
    while isinstance(expr, relax.Var) and not isinstance(values.get(expr), relax.Call | None):
        expr = values[expr]
    if isinstance(expr, relax.Tuple):
        return [var for field in expr.fields for var in results_of(field, values)]
    return [expr] if isinstance(expr, relax.Var) else []


def packed_name(value) -> str:
    """The name of the packed function that a value is a call of, or ""."""
    is_packed = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return str(value.op.global_symbol) if is_packed else ""
