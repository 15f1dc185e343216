"""Operators that read or make no element: what PyTorch says they give."""

import torch
import torch.nn.functional as F

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


class Nothing(torch.nn.Module):
    def forward(self, x):
        none = x[:, :0]
        return (
            none.any(1),
            none.all(1),
            (x[..., :0] > 0).all(-1),
            none.any(),
            x[..., :0].any(-1) | (x[..., 0] > 0),
            none.mean(1),
            none.mean(),
            none.sum((1, 2)),
            none.var(1),
            none.bfloat16().mean(1),
            F.mse_loss(none, none),
            none.cumsum(1).sum(1),
            (x @ none.mT).softmax(-1) @ none,
            torch.cat([none + 1, x], 1),
            F.layer_norm(none, (8,)),
        )


def test_of_no_element():
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    results = stof_tvm.build(Nothing(), QUICK_LLVM, (x,), verify=False)(x)
    for got, expected in zip(results, Nothing()(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
