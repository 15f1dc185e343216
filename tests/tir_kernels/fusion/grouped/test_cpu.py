"""The grouped product on LLVM against its definition in PyTorch."""

import numpy as np
import pytest
import torch
import tvm

from tir_kernels.fusion.grouped.cpu import grouped_product
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.problems.grouped import reference, tensors
from tir_kernels.target import parse_target

LLVM = parse_target("llvm")


def run(problem: GroupedProblem, offsets, width=8, registers=16):
    """The kernel's output and its definition in float64; memory that it does not write holds NaN."""
    function = grouped_product(problem, width, registers).with_attr("global_symbol", "main")
    with LLVM:
        kernel = tvm.compile(tvm.IRModule({"main": function}), target=LLVM)["main"]
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, problem.dtype)
    a = torch.randn((problem.m, problem.k), generator=generator).to(dtype)
    w = (torch.randn(problem.w_shape, generator=generator) * problem.k**-0.5).to(dtype)
    ends = torch.tensor(offsets, dtype=getattr(torch, problem.offsets_dtype))
    out = torch.full((problem.m, problem.n), torch.nan, dtype=dtype)
    kernel(*map(tvm.runtime.from_dlpack, (a, w, ends, out)))
    return out.double().numpy(), reference(problem, [a.double(), w.double(), ends], torch)[0].numpy()


@pytest.mark.parametrize(
    "m, n, k, offsets",
    [
        (13, 7, 19, [0, 5, 5, 11]),  # empty groups, and rows of none
        (64, 40, 32, [64]),  # one group
        (45, 100, 33, [0, 0, 45, 45]),  # one group with all rows
        (70, 33, 8, [1, 2, 3, 70]),
        (1, 5, 3, [0, 1]),
        (3, 16, 5, [0, 0]),  # no row has a group
        (5, 130, 9, [1, 1, 2, 2, 3, 3, 3, 4, 5, 5, 5]),  # more groups than rows
    ],
)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_groups_of_any_size(m, n, k, offsets, layout):
    actual, expected = run(GroupedProblem(m, n, k, len(offsets), "float32", layout), offsets)
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout, offsets_dtype", [("nk", "int64"), ("kn", "int32")])
def test_half_precision_is_rounded_once(dtype, layout, offsets_dtype):
    problem = GroupedProblem(50, 37, 70, 5, dtype, layout, offsets_dtype)
    actual, expected = run(problem, [7, 7, 30, 31, 49])
    eps = torch.finfo(getattr(torch, dtype)).eps
    np.testing.assert_allclose(actual, expected, rtol=eps / 2, atol=eps / 100)


@pytest.mark.parametrize("width, registers", [(4, 16), (4, 32), (16, 32)])
def test_vectors_of_other_processors(width, registers):
    for layout in ("nk", "kn"):
        actual, expected = run(GroupedProblem(37, 70, 29, 3, "float32", layout), [9, 20, 37], width, registers)
        np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_weights_beyond_32_bit_indices_are_addressed_by_64():
    """2^31 elements fit no test: the code is the same but for its index."""
    script = grouped_product(GroupedProblem(8, 4096, 7168, 256, "bfloat16"), 8, 16).script()
    assert 'T.Cast("int64", found[0])' in script
    assert "int64" not in grouped_product(GroupedProblem(8, 40, 71, 4, "bfloat16"), 8, 16).script()
    shapes = [[str(n.ty.dtype) for n in x.shape] for x in tensors(GroupedProblem(8, 4096, 7168, 256, "float32"))]
    assert {dtype for shape in shapes for dtype in shape} == {"int64"}


def test_offsets_past_the_rows_and_that_decrease_stay_inside():
    """Undefined in PyTorch: the numbers are nobody's business, but no memory besides is touched."""
    actual, _ = run(GroupedProblem(9, 8, 8, 3, "float32"), [20, 4, 9])
    assert np.isfinite(actual).all()
