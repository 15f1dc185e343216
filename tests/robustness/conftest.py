"""How long the tests of this folder are: short, or as `make fuzz` wants them."""

import os

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.search.model_tasks import model_tasks
from tests.stof_tvm.tuning.fakes import CUDA


def count(short: int, long: int) -> int:
    """How often something is tried: `STOF_ROBUSTNESS=long` asks for the second."""
    return long if os.environ.get("STOF_ROBUSTNESS") == "long" else short


LENGTH, WIDTH = 24, 64


class Attention(torch.nn.Module):
    """One attention and one product: little to compile."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = x.unflatten(2, (2, WIDTH // 2)).transpose(1, 2)
        return self.out(
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        )


@pytest.fixture(scope="session")
def gpu_tasks():
    """What there is to tune of the same model for a GPU."""
    example = torch.zeros(1, LENGTH, WIDTH).half()
    mod = import_model(Attention().half().eval(), (example,), {}).mod
    return model_tasks(mod, CUDA, SiteMasks(masks.sliding_window(3)))


@pytest.fixture(scope="session")
def engine():
    """A small engine for this processor."""
    torch.manual_seed(0)
    example = torch.randn(1, LENGTH, WIDTH)
    return stof_tvm.build(Attention().eval(), "llvm", (example,), mask=masks.causal(), tuning_logs=False)
