"""Closed expressions have the values that their operators give; equal ones share one array."""

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.legalizations.closed_values import closed_values


def test_values_of_expressions_that_depend_on_constants_only():
    x = relax.Var("x", relax.TensorType((3,), "bfloat16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            ramp = builder.emit(relax.op.arange(0, 3, 1, "float32"))
            halves = builder.emit(relax.op.astype(relax.op.multiply(ramp, relax.const(0.5)), "bfloat16"))
            again = builder.emit(relax.op.astype(relax.op.multiply(ramp, relax.const(0.5)), "bfloat16"))
            output = builder.emit_output(relax.op.add(x, halves))
        builder.emit_func_output(output)
    bindings = Bindings(builder.finalize()["main"])
    closed = [var for var in bindings.values if ClosedExpressions(bindings).is_closed(var)]
    assert output not in closed and {halves, again} <= {*closed}
    first, second, constant = closed_values(bindings, [halves, again, relax.const(np.float32([1, 2]))])
    assert first.dtype == np.float32 and first.tolist() == [0, 0.5, 1] and constant.tolist() == [1, 2]
    assert np.shares_memory(first, second)
