"""Let all-reduces work in place: a rank's term of a sum, which nothing else reads, becomes the sum.

    total = all_reduce(term)    →    all_reduce(term, term);  total = term

Preconditions: every operator is a call with explicit outputs (`CallTIRRewrite`), memory is not planned yet, and the
packed function takes one tensor for both its arguments.
"""

import tvm
from tvm import relax

from relax_passes.ir.bindings import operator
from relax_passes.runtime.memory_of_variables import ALLOCATION, calls_on, memory_of, packed_name, results_of


@tvm.transform.module_pass(opt_level=0, name="AllReduceInPlace")
class AllReduceInPlace:
    """Rewrite the calls of the packed function `name` in "main"."""

    def __init__(self, name: str):
        self.name = name

    def transform_module(self, mod, _ctx):
        function = mod["main"]
        bindings = [binding for block in function.body.blocks for binding in block.bindings]
        values = {binding.var: binding.value for binding in bindings}
        calls = calls_on(bindings, values)
        kept = {memory_of(var, values) for var in results_of(function.body.body, values)}
        replaced: dict[relax.Var, relax.Var] = {}  # the sum -> the term whose memory it takes
        for number, binding in enumerate(bindings):
            if packed_name(binding.value) == self.name:
                term, total = binding.value.args
                memory = memory_of(term, values)
                is_own = operator(values.get(memory)) == ALLOCATION and operator(values.get(total)) == ALLOCATION
                if is_own and calls[memory][-1] == number and memory not in kept:
                    replaced[total] = term
        if not replaced:
            return mod
        # The sum's variable becomes another name of the term's, also in the call, which is the same for it.
        new = [relax.VarBinding(x.var, replaced.get(x.var, x.value)) for x in bindings]
        mod = mod.clone()
        body = relax.SeqExpr([relax.BindingBlock(new)], function.body.body)
        mod["main"] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        return relax.transform.CanonicalizeBindings()(relax.transform.Normalize()(mod))
