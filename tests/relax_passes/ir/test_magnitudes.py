"""Bounds of what a model computes, against what it computes, and inf where nothing is known."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from relax_passes.ir.bindings import Bindings
from relax_passes.ir.magnitudes import Magnitudes
from stof_tvm.frontend import import_model


class Layer(nn.Module):
    """Each output is bounded whatever x is; the last three are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.projection = nn.Linear(16, 8)
        self.table = nn.Embedding(10, 8)
        with torch.no_grad():
            self.norm.weight.uniform_(-2, 2)

    def forward(self, x, ids):
        normed = self.norm(x)
        q = self.projection(normed)
        halves = torch.cat([-q[..., 4:], q[..., :4]], -1)
        rotated = q * torch.cos(x[..., :8]) + halves * torch.sin(x[..., :8])
        gated = torch.tanh(x) * torch.sigmoid(x)
        rms = functional.rms_norm(x, (16,))
        chosen = torch.where(x > 0, 3.0, -7.0)
        unit = functional.normalize(x, dim=-1)
        square = x[:, :2]
        others = square / square.norm(dim=1).clamp_min(1e-12)  # by norms of other rows
        bounded = normed, q, rotated / 2, gated, rms, chosen, self.table(ids).reshape(2, -1), unit
        return *bounded, x + 1, normed / x, others


@pytest.fixture(scope="module")
def bounds_and_outputs():
    x, ids = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)) * 1e3, torch.tensor([[1, 2], [3, 4]])
    model = Layer()
    function = import_model(model, (x, ids), {}).mod["main"]
    bindings = Bindings(function)
    magnitudes = Magnitudes(bindings)
    outputs = bindings.value(function.body.body)
    return [magnitudes.of(output) for output in outputs.fields], model(x, ids)


def test_bounds_hold_and_are_of_use(bounds_and_outputs):
    for bound, output in zip(*(values[:-3] for values in bounds_and_outputs)):
        largest = output.abs().max().item()
        assert largest <= bound < 100 * largest


def test_what_the_inputs_decide_has_no_bound(bounds_and_outputs):
    assert bounds_and_outputs[0][-3:] == [math.inf] * 3
