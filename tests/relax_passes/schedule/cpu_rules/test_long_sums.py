"""Sums of many numbers keep their digits."""

import pytest
import torch
from torch import nn

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


class Computes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def far_from_zero(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 100


LONG = {
    "mean of tokens": (lambda x: x.mean(1), far_from_zero(1, 60_000, 3)),
    "mean of all": (lambda x: x.mean(), far_from_zero(7, 9001)),
    "sum kept": (lambda x: x.sum((0, 2), keepdim=True), far_from_zero(30, 3, 1025)),
    "squares": (lambda x: (x * x).sum(-1), far_from_zero(2, 100_003)),
    "norm": (lambda x: x.norm(dim=0), far_from_zero(50_000, 2)),
    "variance": (lambda x: x.var(1), far_from_zero(2, 20_000, 3)),
    "statistics of a batch": (
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        far_from_zero(9, 2, 5000),
    ),
    "cumulative sum": (lambda x: x.cumsum(-1), far_from_zero(2, 30_000)),
    "cumulative product": (lambda x: (x / 100.5).cumprod(0), far_from_zero(4000, 2)),
    "half": (lambda x: x.float().mean(-1), far_from_zero(2, 60_000).half()),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sums(name):
    function, x = LONG[name]
    model = Computes(function).eval()
    result = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False)(x)
    exact, own = model(x.double()), model(x)
    assert result.dtype == torch.float32
    error = ((result - exact).abs() / exact.abs().clamp_min(1e-3)).max()
    assert error <= max(4e-7, 4 * ((own - exact).abs() / exact.abs().clamp_min(1e-3)).max()), error


def test_what_cancels_is_pytorchs():
    """Rows of a LayerNorm add up to 0, as far as their own rounding lets them."""
    x = nn.functional.layer_norm(torch.randn(1, 512, 64, generator=torch.Generator().manual_seed(1)), (64,))
    engine = stof_tvm.build(Computes(torch.sum).eval(), QUICK_LLVM, (x,), tuning_logs=False)  # verified
    assert (engine(x) - x.double().sum()).abs() < 1e-5


@pytest.mark.parametrize("length, is_wide", [(1000, False), (1024, True)])
def test_short_sums_stay_in_float32(monkeypatch, tmp_path, length, is_wide):
    monkeypatch.setenv("STOF_DUMP_DIR", str(tmp_path))
    x = torch.rand(4, length)
    stof_tvm.build(Computes(lambda x: x.sum(-1)).eval(), QUICK_LLVM, (x,), tuning_logs=False, verify=False)
    (lowered,) = tmp_path.glob("*schedule_functions.py")
    assert ("float64" in lowered.read_text()) == is_wide
