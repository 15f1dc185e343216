"""Rows without anything kept, through `build`: the model's own follow PyTorch, those a given mask empties are 0."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM

S = 16
BELOW = torch.ones(S, S, dtype=torch.bool).tril(-1)  # row 0 is empty
DISTANT = torch.zeros(S, S, dtype=torch.bool)
DISTANT[:, 4:] = True  # rows up to 4 keep nothing of BELOW


class ByHand(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(8)
        return torch.softmax(scores.masked_fill(~BELOW, -math.inf), -1) @ v


class Whole(nn.Module):
    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=BELOW)


@pytest.mark.parametrize(("model", "own"), [(ByHand(), math.nan), (Whole(), 0.0)])
def test_a_given_mask_empties_rows_to_zero_and_the_models_own_follow_pytorch(model, own):
    q, k, v = torch.randn(3, 1, 2, S, 8, generator=torch.Generator().manual_seed(0))
    engine = stof_tvm.build(model, QUICK_LLVM, (q, k, v), masks.from_tensor(DISTANT))
    out = engine(q, k, v)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~(BELOW & DISTANT), -math.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    expected[:, :, 0] = own
    torch.testing.assert_close(out, expected, equal_nan=True, atol=2e-6, rtol=0)
    assert (out[:, :, 1:5] == 0).all()
