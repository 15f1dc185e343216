"""Chains of slices and reshapes: where they are stored, and that what they give is the same."""

import pytest
import torch
import tvm
from tvm import relax

import stof_tvm
from relax_passes.schedule.cut_views import CutViews
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import module_of


def relative_shift(x: torch.Tensor) -> torch.Tensor:
    """Row i moved by i places, as relative positions are: pad, reshape, slice, reshape."""
    *batch, rows, columns = x.shape
    padded = torch.cat([x.new_zeros(*batch, rows, 1), x], -1)
    return padded.view(*batch, columns + 1, rows)[..., 1:, :].reshape(*batch, rows, columns)


def narrowing_shift(x: torch.Tensor) -> torch.Tensor:
    *batch, rows, columns = x.shape
    return x.reshape(*batch, columns, rows)[..., 2:, :].reshape(*batch, rows, columns - 2)


def parted_shift(x: torch.Tensor) -> torch.Tensor:
    *batch, rows, columns = x.shape
    first, second = x.reshape(*batch, columns, rows).split([5, columns - 5], -2)
    return torch.cat([second, first], -2).reshape(*batch, rows, columns)


def padded_shift(x: torch.Tensor) -> torch.Tensor:
    *batch, rows, columns = x.shape
    return torch.nn.functional.pad(x, (2, 3)).reshape(*batch, columns + 5, rows)[..., :columns, :].reshape(x.shape)


@pytest.mark.parametrize("shift", [relative_shift, narrowing_shift, parted_shift, padded_shift])
def test_a_long_chain_builds_and_is_exact(shift):
    class Model(torch.nn.Module):
        def forward(self, x):
            x = x * 2
            for _ in range(5):  # ten reshapes
                x = shift(x)
            return x + 1

    x = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    engine = stof_tvm.build(Model(), QUICK_LLVM, (x,), tuning_logs=False)
    assert torch.equal(engine(x), Model()(x))


def stored(*steps) -> int:
    """How many reshapes of the chain that `steps` emit are stored; x is (4, 6, 8)."""
    x = relax.Var("x", relax.TensorType((4, 6, 8), "float32"))

    def body(builder):
        value = x
        for step in steps:
            value = builder.emit(step(value))
        return value

    mod = CutViews()(module_of([x], body))
    calls: list = []
    tvm.relax.analysis.post_order_visit(
        mod["main"], lambda node: calls.append(node) if isinstance(node, relax.Call) else None
    )
    return sum(call.op == tvm.ir.Op.get("relax.call_tir") for call in calls)


def reshape(*shape):
    return lambda x: relax.op.reshape(x, shape)


def cut(axis, begin, end):
    return lambda x: relax.op.strided_slice(x, [axis], [begin], [end])


def twice(x):
    return relax.op.add(x, x)


def total(x):
    return relax.op.sum(x, -1)


SHIFT = reshape(4, 8, 6), cut(1, 1, 8), reshape(4, 6, 7)
AGAIN = cut(2, 1, 7), reshape(4, 9, 4)


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        (SHIFT, 0),
        ((*SHIFT, *AGAIN), 1),
        ((*SHIFT, twice, *AGAIN), 1),
        ((*SHIFT, lambda x: relax.op.astype(x, "float16"), *AGAIN), 1),
        ((*SHIFT, *AGAIN, cut(1, 1, 8), reshape(4, 4, 7)), 1),  # the chain begins anew behind what was stored
        ((*SHIFT, *AGAIN, cut(1, 1, 8), reshape(4, 4, 7), cut(2, 0, 6), reshape(4, 3, 8)), 2),
        ((*SHIFT, total, cut(1, 1, 6), reshape(2, 10)), 0),  # a sum is stored anyway
        # Heads parted, halved, joined and parted again: strides lead through all of it.
        ((cut(2, 4, 8), reshape(4, 6, 2, 2), cut(3, 0, 1), reshape(24, 2), reshape(4, 3, 2, 2)), 0),
        ((cut(0, 1, 3), reshape(12, 8), cut(1, 0, 4), reshape(2, 6, 2, 2), cut(0, 1, 2), reshape(6, 4)), 0),
        ((reshape(4, 8, 6), reshape(24, 8), reshape(2, 96), reshape(6, 4, 8)), 0),  # nothing is cut
    ],
)
def test_what_is_stored(steps, count):
    assert stored(*steps) == count
