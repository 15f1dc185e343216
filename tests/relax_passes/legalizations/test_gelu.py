"""GELU of halves has its tail."""

import pytest
import torch

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


class GELU(torch.nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        return torch.nn.functional.gelu(x, approximate=self.approximate)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_each_element_has_its_digits(dtype, approximate):
    """Relative to itself, not to the largest: -3.7 gave 0 instead of -4e-4 in float16."""
    model, x = GELU(approximate), torch.linspace(-4, 12, 641).to(dtype)[None]
    result = stof_tvm.build(model.eval(), QUICK_LLVM, (x,), tuning_logs=False, verify=False)(x)
    exact = model(x.double())
    tail = 3e-3 if dtype == torch.float32 else 0  # where 1 + erf(-4) cancels, in PyTorch too
    allowed = (2 * torch.finfo(dtype).eps + tail) * exact.abs()
    assert ((result.double() - exact).abs() <= allowed + torch.finfo(dtype).tiny).all()
