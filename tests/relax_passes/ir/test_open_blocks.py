"""No error leaves TVM warning on stderr of builders that were destroyed with blocks."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax

import relax_passes
import stof_tvm
from relax_passes.ir.open_blocks import close_blocks, closing_blocks
from stof_tvm import masks
from stof_tvm.frontend import import_model
from tir_kernels.errors import MaskError, StofError


class Lambda(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


X = torch.randn(2, 4, 16, 8)


def sdpa(mask):
    return Lambda(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def build(mask=None, own=None, **more):
    return stof_tvm.build(sdpa(own), "llvm", (X,), mask, **more)


FAILURES = {
    "a converter": lambda: import_model(Lambda(lambda x: F.dropout(x, 0.5, training=True)), (X,)),
    "an operator": lambda: import_model(Lambda(torch.bernoulli), (X.abs().clamp(0, 1),)),
    "an own mask that keeps nothing": lambda: build(own=torch.zeros(16, 16, dtype=torch.bool)),
    "a mask that keeps nothing": lambda: build(masks.from_tensor(np.zeros((16, 16), bool))),
    "a mask of other heads": lambda: build(masks.per_head([masks.causal()] * 3)),
    "a mask of other lengths": lambda: build(np.ones((15, 16), bool), own=torch.ones(16, 16).tril().bool()),
    "a scheme that does not fit": lambda: build(fusion_scheme="0000000"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_is_all_that_is_told(capfd, failure):
    with pytest.raises(StofError):
        FAILURES[failure]()
    gc.collect()
    assert "BlockBuilder" not in capfd.readouterr().err


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_an_exception_leaves_open(capfd, is_closed):
    builder = relax.BlockBuilder()
    try:
        with builder.function("main", []), builder.dataflow():
            raise MaskError("within")
    except MaskError:
        if is_closed:
            close_blocks(builder)
    del builder
    gc.collect()
    assert ("destroyed with remaining blocks" in capfd.readouterr().err) != is_closed


def test_without_an_exception_nothing_is_closed():
    builder = relax.BlockBuilder()
    with closing_blocks(builder), builder.function("main", []):
        with closing_blocks(builder), builder.dataflow():
            out = builder.emit_output(relax.const(1.0))
        builder.emit_func_output(out)
    assert "main" in {name.name_hint for name in builder.finalize().get_global_vars()}


def test_whatever_builds_a_function_closes_its_blocks():
    for package in (relax_passes, stof_tvm):
        for path in Path(package.__path__[0]).rglob("*.py"):
            text = path.read_text()
            scopes = [line for line in text.splitlines() if re.search(r"with .*builder\.function\(", line)]
            assert all("closing_blocks(" in line for line in scopes), path
            assert "PyExprMutator)" not in text or "closing_blocks(" in text, path
