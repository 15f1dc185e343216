"""Let all-reduces work in place: a rank's term of a sum, which nothing else reads, becomes the sum.

    total = all_reduce(term)    →    all_reduce(term, term);  total = term

Preconditions: every operator is a call with explicit outputs (`CallTIRRewrite`), memory is not planned yet, and the
packed function takes one tensor for both its arguments.
"""

import tvm
from tvm import relax

from relax_passes.ir.bindings import operator

ALLOCATION = "builtin.alloc_tensor"


@tvm.transform.module_pass(opt_level=0, name="AllReduceInPlace")
class AllReduceInPlace:
    """Rewrite the calls of the packed function `name` in "main"."""

    def __init__(self, name: str):
        self.name = name

    def transform_module(self, mod, _ctx):
        function = mod["main"]
        bindings = [binding for block in function.body.blocks for binding in block.bindings]
        values = {binding.var: binding.value for binding in bindings}
        last = _last_readers(bindings, values)
        kept = {_memory(var, values) for var in _results(function.body.body, values)}
        replaced: dict[relax.Var, relax.Var] = {}  # the sum -> the term whose memory it takes
        for number, binding in enumerate(bindings):
            if self._is_all_reduce(binding.value):
                term, total = binding.value.args
                memory = _memory(term, values)
                is_own = operator(values.get(memory)) == ALLOCATION and operator(values.get(total)) == ALLOCATION
                if is_own and last[memory] == number and memory not in kept:
                    replaced[total] = term
        if not replaced:
            return mod
        # The sum's variable becomes another name of the term's, also in the call, which is the same for it.
        new = [relax.VarBinding(x.var, replaced.get(x.var, x.value)) for x in bindings]
        mod = mod.clone()
        body = relax.SeqExpr([relax.BindingBlock(new)], function.body.body)
        mod["main"] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        return relax.transform.CanonicalizeBindings()(relax.transform.Normalize()(mod))

    def _is_all_reduce(self, value) -> bool:
        is_packed = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
        return is_packed and str(value.op.global_symbol) == self.name


def _memory(var: relax.Var, values: dict) -> relax.Var:
    """The variable whose memory another name or a view is of."""
    while (value := values.get(var)) is not None:
        inner = value.args[0] if operator(value) == "reshape" else value
        if not isinstance(inner, relax.Var):
            return var
        var = inner
    return var


def _last_readers(bindings: list, values: dict) -> dict[relax.Var, int]:
    """The number of the last binding that reads each memory, other names and views not counted."""
    last: dict[relax.Var, int] = {}
    for number, binding in enumerate(bindings):
        if isinstance(binding.value, relax.Call) and operator(binding.value) != "reshape":
            for var in relax.analysis.free_vars(binding.value):
                last[_memory(var, values)] = number
    return last


def _results(expr, values: dict) -> list[relax.Var]:
    """The variables of a function's results, each field of a tuple."""
    while isinstance(expr, relax.Var) and not isinstance(values.get(expr), relax.Call | None):
        expr = values[expr]
    if isinstance(expr, relax.Tuple):
        return [var for field in expr.fields for var in _results(field, values)]
    return [expr] if isinstance(expr, relax.Var) else []
