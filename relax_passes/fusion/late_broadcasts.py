"""LateBroadcasts: elementwise operators of constants compute before their operands are broadcast, not after.

Positions that a model spreads over batch and heads, and then bounds or shifts, stay a small table, which kernels read
through the broadcast.  Preconditions: "main" is one dataflow block; before `FoldClosedExpressions`.
"""

import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from tir_kernels.fusion.group.operators import ELEMENTWISE

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="LateBroadcasts")
class LateBroadcasts:
    """Move the broadcasts of closed expressions of "main" behind the elementwise operators that follow them."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        closed = ClosedExpressions(bindings).closed_vars
        small: dict = {}  # variable -> the new variable of the same elements, each of them once

        def replace(builder, var, new):
            call = bindings.values[var]
            if var not in closed or not isinstance(call, relax.Call) or static_shape(var) is None:
                return None
            if operator(call) == "broadcast_to":
                source = call.args[0]
                small[var] = small.get(source, new(source))
                return None
            if operator(call) not in (*ELEMENTWISE, "astype") or not any(a in small for a in call.args):
                return None
            arguments = [small.get(a, new(a)) if isinstance(a, relax.Expr) else a for a in call.args]
            compact = builder.normalize(relax.Call(call.op, arguments, call.attrs))
            if math.prod(shape_of(compact)) >= math.prod(shape_of(var)):
                return None
            small[var] = builder.emit(compact)
            return op.broadcast_to(small[var], shape_of(var))

        return rebuild(mod, replace) if any(_is_broadcast(bindings, var) for var in closed) else mod


def _is_broadcast(bindings: Bindings, var) -> bool:
    return bindings.call(var, "broadcast_to") is not None
