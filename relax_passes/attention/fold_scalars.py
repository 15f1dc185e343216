"""FoldScalars: a single number that is computed from constants becomes a constant.

Models compute the square root by which they divide their scores; the matchers, and bounds on what is added to scores,
need the number.  Exponentials stay, because the matchers look for a sink's logit in them.  Precondition: "main" is one
dataflow block with constants bound.
"""

import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, element_count
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from relax_passes.legalizations.closed_values import closed_values


@tvm.transform.module_pass(opt_level=0, name="FoldScalars")
class FoldScalars:
    """Replace the closed expressions of "main" that have one element, where that is not known to be one number."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        closed = ClosedExpressions(bindings)
        single = [
            var
            for var in closed.closed_vars
            if element_count(var) == 1 and bindings.scalar(var) is None and bindings.call(var, "exp") is None
        ]
        if not single:
            return mod
        values = dict(zip(single, closed_values(bindings, single)))

        def replace(_builder, var, _new):
            return relax.const(values[var], dtype_of(var)) if var in values else None

        return rebuild(mod, replace)
