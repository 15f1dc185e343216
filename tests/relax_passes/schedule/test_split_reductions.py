"""Reductions to one number: large ones in two halves, all else as it was."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.schedule.split_reductions import MOST_PARTS, SplitReductions, column_parts_of, parts_of
from tests.relax_passes.fusion.modules import module_of, run

op = relax.op


def module(shape, body):
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    return module_of([x], lambda builder: body(builder.emit, x))


def reductions(mod) -> list[tuple]:
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    calls = [v for v in values if isinstance(v, relax.Call) and v.op.name in ("relax.max", "relax.sum", "relax.min")]
    return [tuple(int(n) for n in call.args[0].ty.shape) for call in calls]


@pytest.mark.parametrize("name", ["max", "min", "sum"])
@pytest.mark.parametrize("axis", [None, [0, 1, -1]])
def test_a_large_reduction_has_two_halves(name, axis):
    x = np.random.default_rng(0).integers(-9, 9, (4, 32, 96)).astype("float32")  # whole numbers: sums are exact
    before = module(x.shape, lambda emit, v: emit(getattr(op, name)(emit(op.abs(v)), axis)))
    after = SplitReductions()(before)
    assert reductions(after) == [(2, 6144), (2,)]
    np.testing.assert_array_equal(run(after, x), run(before, x))
    np.testing.assert_array_equal(run(after, x), getattr(np.abs(x), name)())


@pytest.mark.parametrize(
    "shape, body",
    [
        ((4, 32, 96), lambda emit, x: emit(op.max(x, [1, 2]))),
        ((4, 32, 96), lambda emit, x: emit(op.sum(x, [1]))),
        ((4, 509, 96), lambda emit, x: emit(op.sum(x, [1]))),
        ((4, 512, 96), lambda emit, x: emit(op.sum(emit(op.astype(x, "float16")), [1]))),
        ((4, 32, 96), lambda emit, x: emit(op.max(x, keepdims=True))),
        ((4, 32, 96), lambda emit, x: emit(op.mean(x))),
        ((4, 8), lambda emit, x: emit(op.max(x))),
        ((8193,), lambda emit, x: emit(op.max(x))),
    ],
    ids=[
        "some axes",
        "few rows",
        "a prime number of rows",
        "partial sums in float16",
        "keepdims",
        "mean",
        "small",
        "odd",
    ],
)
def test_all_else_stays(shape, body):
    before = module(shape, body)
    tvm.ir.assert_structural_equal(SplitReductions()(before), before)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["max", "sum"])
def test_columns_have_two_halves(name, keepdims):
    """A group norm's sums: what is added or multiplied is cut with x, whatever its shape."""
    x = np.random.default_rng(0).integers(-9, 9, (3, 320, 24)).astype("float32")
    shift, scale, row = (np.random.default_rng(i).integers(1, 4, shape).astype("float32") for i, shape in SHIFTS)

    def body(emit, v):
        moved = emit(op.subtract(emit(op.astype(emit(op.astype(v, "int32")), "float32")), relax.const(shift)))
        scaled = emit(op.multiply(emit(op.multiply(moved, relax.const(scale))), relax.const(row)))
        return emit(getattr(op, name)(emit(op.multiply(scaled, relax.const(2.0))), [1], keepdims=keepdims))

    before = module(x.shape, body)
    after = SplitReductions()(before)
    assert reductions(after) == [(3, 10, 32, 24), (3, 10, 24)]
    expected = getattr((x - shift) * scale * row * 2, name)(1, keepdims=keepdims)
    for mod in (after, before):
        (found,) = run(mod, x)
        np.testing.assert_array_equal(found, expected)


SHIFTS = (1, (3, 1, 24)), (2, (24,)), (3, (320, 1))


def test_parts_of_columns():
    assert column_parts_of(32000, 2048) == 64 and column_parts_of(32000, 1 << 20) == 1
    assert column_parts_of(31, 8) == 1 and column_parts_of(1009, 8) == 1 and column_parts_of(1 << 20, 1) == MOST_PARTS


def test_elementwise_operators_stay_with_the_first_half():
    """A reshape between them and the reduction would end their kernel."""
    mod = SplitReductions()(module((4, 32, 96), lambda emit, x: emit(op.max(emit(op.negative(emit(op.abs(x))))))))
    names = [b.value.op.name for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert names[-5:] == ["relax.reshape", "relax.abs", "relax.negative", "relax.max", "relax.max"]


@pytest.mark.parametrize("elements", [1, 4096, 8192, 3 << 20, 16 * 2048 * 768, (1 << 20) + 1])
def test_parts_divide_and_are_long_enough(elements):
    parts = parts_of(elements)
    assert 1 <= parts <= MOST_PARTS and elements % parts == 0
    assert parts == 1 or elements // parts >= 4096
