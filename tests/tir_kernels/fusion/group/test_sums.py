"""Sums of few terms are written out in a group; longer ones are left to the reductions' kernel, which computes them."""

import pytest

from tests.gpu.group_cases import Builder, counted, normalized, pooled, weighted_sum
from tests.tir_kernels.fusion.group.group_emulation import SM_80
from tests.tir_kernels.fusion.reduce.reduce_emulation import assert_right
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.fusion.group import group
from tir_kernels.fusion.reduce import reduce

LONG = {
    "counts": counted(5, 77),
    "counts, vectors": counted(3, 1000, "int32", "int64"),
    "sums": pooled(2, 5, 40),
    "sums, odd": pooled(1, 3, 61, "float32"),
}


@needs_gxx
@pytest.mark.parametrize("name", LONG)
def test_long_sums_are_the_reductions(name, tmp_path):
    assert "of more than" in group.unsupported(LONG[name], SM_80)
    assert reduce.unsupported(LONG[name], SM_80) is None
    assert_right(LONG[name], tmp_path)


def summed(shape, axes, dtype="float32", operator="sum"):
    b = Builder((shape, dtype))
    kept = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    return b.problem(b.add(operator, 0, shape=kept, dtype=dtype, numbers=axes))


def test_few_terms_are_the_groups():
    for problem in (weighted_sum(8, 32, 16), normalized(8, 16), summed((4, 8, 4, 3), (1, 2)), summed((4, 8), (0,))):
        assert group.unsupported(problem, SM_80) is None


@pytest.mark.parametrize(
    "problem, why",
    [
        (summed((33, 8), (0,)), "a sum of more than 32 terms"),
        (summed((4, 9, 4, 3), (1, 2)), "a sum of more than 32 terms"),
        (summed((8, 17), (1,)), "a sum of more than 16 terms"),
        (summed((8, 4), (0,), "bool"), "a sum of bool"),
        (summed((8, 4), (0,), "int32", "mean"), "a mean of int32"),
        (summed((8, 4), (0,), operator="max"), "max is no operator"),
    ],
)
def test_what_is_refused(problem, why):
    assert why in group.unsupported(problem, SM_80)
