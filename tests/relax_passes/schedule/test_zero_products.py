"""0 · NaN and 0 · inf are NaN, in a product alone and in the scores of an attention."""

import math

import pytest
import torch
from torch import nn

import stof_tvm


class Times(nn.Module):
    def forward(self, x):
        return x * 0.0, x * 2.0, torch.tensor(0) * x, x / 0, x / -0.0, 0.0**x


class Scores(nn.Module):
    def forward(self, q, k, v):
        return ((q @ k.mT) * 0.0).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_products(dtype):
    x = torch.tensor([[1.0, math.nan, math.inf, -math.inf, -2.0, 0.0]], dtype=dtype)
    outputs = stof_tvm.build(Times(), "llvm", (x,), verify=False)(x)
    for actual, expected in zip(outputs, Times()(x), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_scores_of_nan_times_0():
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    q[0, 1, 3, 2] = math.nan
    out, expected = stof_tvm.build(Scores(), "llvm", (q, k, v), verify=False)(q, k, v), Scores()(q, k, v)
    assert expected[0, 1, 3].isnan().all()
    torch.testing.assert_close(out, expected, equal_nan=True)
