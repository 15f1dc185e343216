"""Norms that a model writes out become one operator of the same value, whatever way it has for means and roots."""

import numpy as np
import pytest
import torch
import tvm
from torch import nn

from relax_passes.fusion.canonicalize_operators import CanonicalizeOperators
from relax_passes.ir.bindings import Bindings, operator
from stof_tvm.frontend import import_model
from tests.relax_passes.fusion.modules import run

WIDTH = 48


class Function(nn.Module):
    """f(x, weight, bias)."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.weight, self.bias = nn.Parameter(torch.linspace(0.5, 2, WIDTH)), nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return self.f(x, self.weight, self.bias)


def mean(x, dim=-1):
    return x.mean(dim, keepdim=True)


def centered(x):
    return x - mean(x)


def variance(x):
    return mean(centered(x).pow(2))


LAYER_NORMS = {
    "rsqrt": lambda x: centered(x) * torch.rsqrt(variance(x) + 1e-5),
    "sqrt": lambda x: centered(x) / torch.sqrt(variance(x) + 1e-5),
    "epsilon first": lambda x: centered(x) / (1e-5 + variance(x)) ** 0.5,
    "the inverse first": lambda x: (1 / torch.sqrt(variance(x) + 1e-5)) * centered(x),
    "a reciprocal": lambda x: centered(x) * torch.sqrt(variance(x) + 1e-5).reciprocal(),
    "of what is centred": lambda x: (lambda c: c / torch.sqrt(mean(c * c) + 1e-5))(centered(x)),
    "x.var": lambda x: centered(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    "var_mean": lambda x: (lambda v, m: (x - m) * torch.rsqrt(v + 1e-5))(
        *torch.var_mean(x, -1, keepdim=True, correction=0)
    ),
    "sums": lambda x: (lambda c: c / torch.sqrt(c.square().sum(-1, keepdim=True) / WIDTH + 1e-5))(
        x - x.sum(-1, keepdim=True) / WIDTH
    ),
    "sums times 1 / n": lambda x: (lambda c: c / torch.sqrt(c.square().sum(-1, keepdim=True) * (1 / WIDTH) + 1e-5))(
        x - x.sum(-1, keepdim=True) * (1 / WIDTH)
    ),
}
RMS_NORMS = {
    "sqrt": lambda x: x / torch.sqrt(mean(x * x) + 1e-6),
    "power of 1/2": lambda x: x / (mean(x.square()) + 1e-6) ** 0.5,
    "power of -1/2": lambda x: x * torch.pow(mean(x.pow(2)) + 1e-6, -0.5),
    "the inverse": lambda x: x * (1.0 / torch.sqrt(mean(x * x) + 1e-6)),
    "sum": lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) / WIDTH + 1e-6),
}
OTHERS = {
    "the unbiased variance": lambda x: centered(x) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
    "another mean": lambda x: (x - mean(x, 1)) / torch.sqrt(variance(x) + 1e-5),
    "the mean of something else": lambda x: (x - mean(x * 2)) / torch.sqrt(mean((x - mean(x * 2)) ** 2) + 1e-5),
    "the variance of something else": lambda x: centered(x) / torch.sqrt(variance(x * 2) + 1e-5),
    "not centred below": lambda x: centered(x) / torch.sqrt(mean(x * x) + 1e-5),
    "centred below only": lambda x: x / torch.sqrt(variance(x) + 1e-5),
    "epsilon outside": lambda x: centered(x) / (torch.sqrt(variance(x)) + 1e-5),
    "n - 1": lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) / (WIDTH - 1) + 1e-6),
    "nearly 1 / n": lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) * (1.0001 / WIDTH) + 1e-6),
    "two for one": lambda x: x * (2 / torch.sqrt(mean(x * x) + 1e-6)),
    "the root of the inverse upside down": lambda x: x * torch.sqrt(mean(x * x) + 1e-6),
    "a negative epsilon": lambda x: x / torch.sqrt(mean(x * x + 1) - 1e-6),
}


def imported(f, dtype=torch.float32):
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = Function(f).to(dtype)
    return import_model(model, (x,), None).mod, x, model


def names(mod) -> list[str]:
    return [name for value in Bindings(mod["main"]).values.values() if (name := operator(value))]


def canonical(f, dtype=torch.float32) -> list[str]:
    """The operators of f after the pass, which compute what f does."""
    before, x, model = imported(f, dtype)
    after = CanonicalizeOperators()(before)
    with torch.no_grad():
        expected = f(x.float(), model.weight.float(), model.bias.float())
    (out,) = run(after, x.numpy())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    np.testing.assert_allclose(out.astype("float32"), expected.numpy(), rtol=tolerance, atol=tolerance)
    return names(after)


@pytest.mark.parametrize(
    ("f", "name"),
    [*((f, "nn.layer_norm") for f in LAYER_NORMS.values()), *((f, "nn.rms_norm") for f in RMS_NORMS.values())],
    ids=[*LAYER_NORMS, *(f"rms: {name}" for name in RMS_NORMS)],
)
def test_every_way_of_writing_is_one_operator(f, name):
    assert canonical(lambda x, w, b: f(x)) == [name]
    assert canonical(lambda x, w, b: w * f(x)) == [name]


@pytest.mark.parametrize("norm", [LAYER_NORMS["rsqrt"], LAYER_NORMS["sqrt"]])
def test_weight_and_bias_belong_to_a_layer_norm(norm):
    assert canonical(lambda x, w, b: norm(x) * w + b) == ["nn.layer_norm"]
    assert canonical(lambda x, w, b: b + w * norm(x)) == ["nn.layer_norm"]
    assert canonical(lambda x, w, b: norm(x) + b) == ["nn.layer_norm"]
    assert canonical(lambda x, w, b: RMS_NORMS["sqrt"](x) * w + b) == ["nn.rms_norm", "add"]


def test_a_norm_in_float32_of_half_precision():
    """Command R's, which casts the weighted norm back, and DeBERTa's, which casts the norm back before its weight."""
    norm = LAYER_NORMS["rsqrt"]
    late = canonical(lambda x, w, b: (w.float() * norm(x.float())).to(x.dtype), torch.float16)
    early = canonical(lambda x, w, b: w * norm(x.float()).to(x.dtype) + b, torch.float16)
    for found in (late, early):
        assert found.count("nn.layer_norm") == 1 and set(found) == {"astype", "nn.layer_norm"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_quotients_stay(name):
    before, _, _ = imported(lambda x, w, b: OTHERS[name](x))
    tvm.ir.assert_structural_equal(CanonicalizeOperators()(before), before)
