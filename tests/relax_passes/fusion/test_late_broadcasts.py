"""Elementwise operators of constants compute before their operands are broadcast."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.fusion.fold_closed_expressions import FoldClosedExpressions
from relax_passes.fusion.late_broadcasts import LateBroadcasts
from tests.relax_passes.fusion.modules import module_of, run

op = relax.op
X = relax.Var("x", relax.TensorType((6, 4, 8), "float32"))


def table():
    return relax.const(np.arange(32, dtype="int64").reshape(1, 4, 8) - 8, "int64")


def spread(emit, table):
    return emit(op.broadcast_to(table, (6, 4, 8)))


def gathered(places_of):
    return module_of([X], lambda b: b.emit(op.gather_elements(X, places_of(b.emit), 2)))


def bounded(emit):
    """Positions spread over the batch, then held inside: what indexing by them means."""
    low = emit(op.maximum(spread(emit, table()), relax.const(0, "int64")))
    return emit(op.minimum(low, relax.const(7, "int64")))


def bounded_first(emit):
    low = emit(op.maximum(table(), relax.const(0, "int64")))
    return spread(emit, emit(op.minimum(low, relax.const(7, "int64"))))


def test_bounds_come_before_the_broadcast():
    tvm.ir.assert_structural_equal(LateBroadcasts()(gathered(bounded)), gathered(bounded_first))


def test_two_tables_along_different_axes_are_joined_where_both_are_small():
    def sums(emit, shape):
        rows = emit(op.broadcast_to(relax.const(np.ones((4, 1), "float32")), shape))
        columns = emit(op.broadcast_to(relax.const(np.ones((1, 8), "float32")), shape))
        return emit(op.add(rows, columns))

    mod = LateBroadcasts()(module_of([X], lambda b: b.emit(op.add(X, sums(b.emit, (6, 4, 8))))))
    (inner,) = [b.value for b in mod["main"].body.blocks[0].bindings if b.value.op.name == "relax.broadcast_to"]
    assert tuple(inner.args[0].ty.shape) == (4, 8)
    mod = module_of([X], lambda b: b.emit(op.add(X, sums(b.emit, (4, 8)))))
    tvm.ir.assert_structural_equal(LateBroadcasts()(mod), mod)  # nothing would be smaller


def test_what_depends_on_inputs_and_what_is_no_elementwise_operator_stays():
    for body in (
        lambda b: b.emit(op.add(b.emit(op.broadcast_to(b.emit(op.max(X, 0, keepdims=True)), (6, 4, 8))), X)),
        lambda b: b.emit(op.add(X, b.emit(op.cumsum(b.emit(op.astype(spread(b.emit, table()), "float32")), 0)))),
    ):
        mod = module_of([X], body)
        found = [b.value.op.name for b in LateBroadcasts()(mod)["main"].body.blocks[0].bindings]
        assert sorted(found) == sorted(b.value.op.name for b in mod["main"].body.blocks[0].bindings)


def test_the_numbers_and_places_of_four_bytes():
    mod = gathered(bounded)
    folded = FoldClosedExpressions()(LateBroadcasts()(mod))
    view, gather = [b.value for b in folded["main"].body.blocks[0].bindings]
    assert tuple(view.args[0].ty.shape) == (1, 4, 8) and str(view.args[0].ty.dtype) == "int32"
    x = np.random.default_rng(0).normal(size=(6, 4, 8)).astype("float32")
    np.testing.assert_array_equal(run(folded, x), run(mod, x))


def test_places_that_are_read_as_numbers_too_stay_int64():
    def body(b):
        places = b.emit(op.add(table(), relax.const(8, "int64")))
        found = b.emit(op.gather_elements(X, b.emit(op.broadcast_to(places, (6, 4, 8))), 2))
        return b.emit(op.add(found, b.emit(op.astype(b.emit(op.multiply(places, b.emit(number))), "float32"))))

    number = op.astype(op.max(X), "int64")
    folded = FoldClosedExpressions()(module_of([X], body))
    values = [b.value for b in folded["main"].body.blocks[0].bindings]
    (view,) = [value for value in values if value.op.name == "relax.broadcast_to"]
    assert str(view.args[0].ty.dtype) == "int64"


@pytest.mark.parametrize("place", [np.iinfo("int64").min, -(1 << 31) - 1, 1 << 31])
def test_places_beyond_int32_stay_int64(place):
    """They are outside, and must not come back inside by losing bits."""
    places = np.zeros((6, 4, 8), "int64")
    places[0, 0, 0] = place
    summed = lambda emit: emit(op.add(relax.const(places, "int64"), relax.const(0, "int64")))
    folded = FoldClosedExpressions()(gathered(summed))
    (gather,) = [b.value for b in folded["main"].body.blocks[0].bindings]
    assert str(gather.args[1].ty.dtype) == "int64"
