"""Places whose range a sort tells are read without a question; others keep theirs."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.fusion.sorting.places_inside import PlacesInside
from relax_passes.fusion.sorting.sorts_to_kernels import SortsToKernels
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.legalizations import LEGALIZATIONS
from tests.relax_passes.fusion.modules import module_of, run
from tir_kernels.target import parse_target

op = relax.op
N = 6
CUDA = parse_target("cuda -arch=sm_80")


def wrapped(emit, place, n, bound=0):
    """A place that may count from the end."""
    below = emit(op.less(place, relax.const(bound, "int64")))
    return emit(op.where(below, emit(op.add(place, relax.const(n, "int64"))), place))


def module(place_of, rows=N, n=N, wrap=True, bound=0, mode="nan"):
    """Rows at places that are computed from the order of other numbers."""
    x, numbers = (relax.Var(*v) for v in (("x", relax.TensorType((rows, 4), "float32")), ("n", typed(n))))

    def body(builder):
        emit = builder.emit
        place = place_of(emit, emit(op.argsort(numbers, 0, False, "int64")))
        place = wrapped(emit, place, rows, bound) if wrap else place
        return emit(op.take(x, place, 0, mode=mode))

    return SortsToKernels(CUDA)(module_of([x, numbers], body))


def typed(n):
    return relax.TensorType((n,), "int64")


def number(value):
    return relax.const(value, "int64")


def modes(mod) -> list[str]:
    return [str(v.attrs.mode) for v in Bindings(mod["main"]).values.values() if operator(v) == "take"]


@pytest.mark.parametrize(
    "place, rows",
    [
        (lambda emit, order: order, N),
        (lambda emit, order: emit(op.floor_divide(order, number(2))), 3),
        (lambda emit, order: wrapped(emit, order, N), N),
        (lambda emit, order: emit(op.reshape(emit(op.minimum(order, number(1))), (2, 3))), 2),
        (lambda emit, order: emit(op.astype(emit(op.astype(order, "int32")), "int64")), N),
    ],
)
def test_orders_lie_inside(place, rows):
    mod = module(place, rows)
    new = PlacesInside()(mod)
    assert "where" not in [operator(v) for v in Bindings(new["main"]).values.values()] and modes(new) == ["clip"]
    x, numbers = np.random.default_rng(0).standard_normal((rows, 4)).astype("float32"), np.array([4, 1, 1, 5, 0, 3])
    legalize = relax.transform.LegalizeOps(LEGALIZATIONS)
    np.testing.assert_array_equal(run(legalize(new), x, numbers)[0], run(legalize(mod), x, numbers)[0])


@pytest.mark.parametrize("n", [3000, 40000])
def test_orders_of_merged_runs_lie_inside(n):
    assert modes(PlacesInside()(module(lambda emit, order: order, n, n))) == ["clip"]


@pytest.mark.parametrize(
    "mod",
    [
        module(lambda emit, order: emit(op.subtract(order, number(1)))),
        module(lambda emit, order: order, N - 1, wrap=False),  # a place past the end
        module(lambda emit, order: emit(op.floor_divide(order, number(2))), 2, wrap=False),
        module(lambda emit, order: order, wrap=False, mode="clip"),
        module(lambda emit, order: emit(op.minimum(order, number(-1)))),
        module(lambda emit, order: emit(op.floor_divide(order, number(-2)))),
    ],
)
def test_places_that_may_lie_outside_keep_their_questions(mod):
    tvm.ir.assert_structural_equal(PlacesInside()(mod), mod)


def test_another_bound_is_no_sign():
    new = PlacesInside()(module(lambda emit, order: order, bound=2))
    assert "where" in [operator(v) for v in Bindings(new["main"]).values.values()] and modes(new) == ["nan"]


def test_without_a_sort_nothing_is_looked_at():
    x, index = relax.Var("x", relax.TensorType((4, 3), "float32")), relax.Var("i", typed(2))
    mod = module_of([x, index], lambda builder: builder.emit(op.take(x, index, 0, mode="nan")))
    tvm.ir.assert_structural_equal(PlacesInside()(mod), mod)
