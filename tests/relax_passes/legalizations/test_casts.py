"""Casts of constants that no number of the other dtype is."""

import math

import pytest
import torch

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


class Cast(torch.nn.Module):
    def __init__(self, value, dtype):
        super().__init__()
        self.value, self.dtype = value, dtype

    def forward(self, x):
        return x + torch.tensor(self.value).to(self.dtype)


@pytest.mark.parametrize("value", [-math.inf, math.nan, 3e10, -2.7, 2**40 + 5, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_scalars_are_cast_as_pytorch_casts_them(value, dtype):
    model, x = Cast(value, dtype), torch.arange(3)
    result = stof_tvm.build(model, QUICK_LLVM, (x,), verify=False)(x)
    assert torch.equal(result, model(x)) and result.dtype == model(x).dtype
