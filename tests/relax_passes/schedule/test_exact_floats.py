"""Comparisons of floats and their negations are PyTorch's where an operand is NaN: elementwise, fused, in a sum."""

import math
import shutil

import pytest
import torch

import stof_tvm


class Comparisons(torch.nn.Module):
    """Each of two inputs (6, 8), 48 elements: whole vectors."""

    def forward(self, x, y):
        return (
            x != x,
            x != y,
            x != 0.5,
            (x == x).logical_not(),
            (x == y).logical_not().to(x.dtype),
            (x > y).logical_not(),
            (x >= y).logical_not().to(torch.int32),
            torch.where((x < y).logical_not(), 1.0, 2.0),
            (x <= 0.5).logical_not().logical_not(),
            (~(x > y)).to(x.dtype),
            x.isnan().logical_not().sum(1),
            torch.isclose(x, x),
            x.bool(),
            x.logical_not(),
            y.masked_fill((x > y).logical_not(), -1.0),
            x == x,
            (x == x).to(x.dtype),
            (x - y == x - y).sum(1),
            torch.logical_or(x > y, x <= y).to(x.dtype),
            (x == y).logical_and(y == y).to(torch.int32),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_negations_are_true_for_nan(dtype):
    x, y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 1], x[1, :3], y[2, 2], x[3, 3] = math.nan, 0.5, math.nan, math.inf
    y[4] = x[4]
    engine = stof_tvm.build(Comparisons(), "llvm", (x, y), verify=False, tuning_logs=False)
    for got, expected in zip(engine(x, y), Comparisons()(x, y), strict=True):
        assert torch.equal(got, expected)


class Cancelled(torch.nn.Module):
    """What integers would cancel."""

    def forward(self, x, y):
        return (
            (x - x).exp(),
            x - x,
            (x + y) - y,
            (x - y) + y,
            y + (x - y),
            x - (x + y),
            (y + x) - (x + y),
            (x + 1e4) - 1e4,
            0 / x,
            0 * x,
            y + x * 0.0,
            (x + 1) * 0,
            x / 0,
            x.relu() - x,
            x - x.relu(),
            torch.where(x > y, x, y) - x,
            torch.maximum(x, y) - y,
            (x.clamp(min=0.5) + y) - x,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinities_and_roundings_do_not_cancel(dtype):
    x, y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 1], x[1, :3], y[2, 2], y[3, 3] = math.nan, 0.0, math.nan, math.inf
    x[4, 4], y[4, 4], y[5] = math.inf, -math.inf, 1e4
    engine = stof_tvm.build(Cancelled(), "llvm", (x, y), verify=False, tuning_logs=False)
    for got, expected in zip(engine(x, y), Cancelled()(x, y), strict=True):
        if dtype == torch.float32:
            assert torch.equal(got.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))
        else:  # halves are rounded less often
            assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


class Gathered(torch.nn.Module):
    """Rows by an index, which TVM's own kernel reads: NaN where the index has no row."""

    def forward(self, x, index):
        return x[:, index]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_is_a_constant_in_cuda(dtype, tmp_path):
    x, index = torch.randn(2, 40, 64).to(dtype), torch.randperm(40)
    engine = stof_tvm.build(Gathered(), "cuda -arch=sm_90a", (x, index), verify=False, tuning_logs=False)
    engine.save(tmp_path / "gathered.stof")  # compiles


def test_gathered_rows_in_bfloat16():
    x, index = torch.randn(2, 40, 64).bfloat16(), torch.randperm(40)
    engine = stof_tvm.build(Gathered(), "llvm", (x, index), verify=False, tuning_logs=False)
    assert torch.equal(engine(x, index), x[:, index])
