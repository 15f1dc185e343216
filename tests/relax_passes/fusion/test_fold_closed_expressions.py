"""What depends on constants only is computed at compile time, once, and only where that is small."""

import numpy as np
import tvm
from tvm import relax

from relax_passes.fusion.fold_closed_expressions import MAX_BYTES, FoldClosedExpressions
from tests.relax_passes.fusion.modules import module_of, run

op = relax.op


def positions_module(length, dtype="float32"):
    """x + table of angles, computed in the graph as rotary embeddings do."""
    x = relax.Var("x", relax.TensorType((length, 2), dtype))

    def body(builder):
        emit = builder.emit
        steps = emit(op.expand_dims(emit(op.arange(0, length, 1, "float32")), 1))
        angles = emit(op.multiply(steps, relax.const(np.array([1.0, 0.5], "float32"))))
        return emit(op.add(x, emit(op.astype(emit(op.sin(angles)), dtype))))

    return module_of([x], body)


def calls(mod) -> list[str]:
    values = [b.value for b in mod["main"].body.blocks[0].bindings]
    return [v.op.name.removeprefix("relax.") for v in values if isinstance(v, relax.Call)]


def test_a_table_of_angles_becomes_a_constant():
    mod = FoldClosedExpressions()(positions_module(8))
    assert calls(mod) == ["add"]
    (call,) = [b.value for b in mod["main"].body.blocks[0].bindings]
    expected = np.sin(np.outer(np.arange(8), [1.0, 0.5])).astype("float32")
    np.testing.assert_allclose(call.args[1].value.numpy(), expected, atol=1e-6)


def test_bfloat16_stays_bfloat16():
    mod = FoldClosedExpressions()(positions_module(8, "bfloat16"))
    (call,) = [b.value for b in mod["main"].body.blocks[0].bindings]
    assert calls(mod) == ["add"] and str(call.args[1].ty.dtype) == "bfloat16"


def test_what_is_too_large_is_computed_by_the_engine():
    length = MAX_BYTES // 8 + 1
    assert calls(FoldClosedExpressions()(positions_module(length))) == calls(positions_module(length))


def test_views_of_constants_stay():
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))

    def body(builder):
        emit = builder.emit
        w = emit(op.permute_dims(relax.const(np.ones((8, 8), "float32"))))
        return emit(op.add(emit(op.matmul(x, w)), emit(op.broadcast_to(relax.const(1.0, "float32"), (4, 8)))))

    mod = module_of([x], body)
    tvm.ir.assert_structural_equal(FoldClosedExpressions()(mod), mod)


def test_results_that_depend_on_no_input():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    mod = module_of([x], lambda builder: builder.emit(op.arange(0, 4, 1, "float32")))
    (result,) = run(FoldClosedExpressions()(mod), np.zeros(4, "float32"))
    np.testing.assert_array_equal(result, np.arange(4))
