"""Running sums of counts become counts: which ones, with which numbers, and what looks alike and is none."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.fusion.sorting.cumulative_counts import CumulativeCounts
from relax_passes.ir.bindings import Bindings, operator
from tests.relax_passes.fusion.modules import module_of, run

op = relax.op
N, COUNT = 5, 40
X = np.random.default_rng(0).integers(-2, 8, COUNT)


def counts(
    x,
    numbers=None,
    dtypes=("int32",),
    axis=1,
    exclusive=False,
    swapped=False,
    scanned=0,
    ones="int32",
):
    numbers = np.arange(N)[:, None] if numbers is None else numbers

    def body(builder):
        emit = builder.emit
        pair = relax.const(np.asarray(numbers, "int64"), "int64"), x
        same = emit(op.equal(*(reversed(pair) if swapped else pair)))
        total = emit(op.sum(emit(op.astype(same, ones)), [axis]))
        for dtype in dtypes:
            total = emit(op.astype(total, dtype))
        return emit(op.cumsum(total, scanned, None, exclusive))

    return module_of([x], body)


def given(*shape, dtype="int64"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def operators(mod) -> list[str]:
    return [operator(value) for value in Bindings(mod["main"]).values.values()]


@pytest.mark.parametrize(
    "mod",
    [
        counts(given(COUNT)),
        counts(given(COUNT), dtypes=("float32", "int32"), swapped=True),
        counts(given(COUNT), dtypes=("int64",), numbers=np.arange(N)[:, None] - 2),
        counts(given(1, COUNT), dtypes=("float32",)),
        counts(given(COUNT, 1), numbers=np.arange(N), axis=0),
        counts(given(COUNT), numbers=np.arange(N)[:, None] + 3, dtypes=()),
    ],
)
def test_counts_up_to_each_number(mod):
    new = CumulativeCounts()(mod)
    assert "cumsum" in operators(mod) and "cumsum" not in operators(new) and "less_equal" in operators(new)
    assert new["main"].ret_ty == mod["main"].ret_ty
    x = X.reshape([int(n) for n in mod["main"].params[0].ty.shape])
    (actual,), (call,) = run(new, x), [v for v in Bindings(mod["main"]).values.values() if operator(v) == "equal"]
    (constant,) = (argument for argument in call.args if not isinstance(argument, relax.Var))
    numbers = constant.value.numpy().ravel()
    np.testing.assert_array_equal(actual, np.cumsum([(X == number).sum() for number in numbers]))


@pytest.mark.parametrize(
    "mod",
    [
        counts(given(COUNT), exclusive=True),
        counts(given(COUNT), numbers=np.array([0, 1, 2, 4, 3])[:, None]),
        counts(given(COUNT), numbers=2 * np.arange(N)[:, None]),
        counts(given(COUNT), dtypes=("int8",)),
        counts(given(COUNT), dtypes=("float16", "int32")),
        counts(given(COUNT), ones="int8"),
        counts(given(N, COUNT)),  # other elements for each number
        counts(given(3, COUNT, 1), numbers=np.arange(N), axis=1, scanned=0),  # along what x varies along
        counts(given((1 << 24) + 1), dtypes=("float32",)),
    ],
)
def test_what_looks_alike_stays(mod):
    tvm.ir.assert_structural_equal(CumulativeCounts()(mod), mod)
