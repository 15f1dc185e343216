"""Attention without a softmax is named, everything else is left alone, and a given mask is never left out."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import stof_tvm
from relax_passes.attention.canonicalize_attention import READ_SCORES
from stof_tvm import masks
from stof_tvm.errors import MaskError, NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.running import largest_error
from tests.relax_passes.attention.near_misses import inputs
from tests.relax_passes.attention.plain_weights_programs import ATTENTION, NONE
from tests.relax_passes.attention.programs import All, Program, reasons

PROGRAMS = [Program(function, "without a softmax") for function in ATTENTION] + [Program(x) for x in NONE]
NAMES = [program.name for program in PROGRAMS]


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=NAMES)
def test_numbers_are_those_of_pytorch(compiled, index):
    error, largest = (
        largest_error(compiled.outputs[index], compiled.expected[index]),
        compiled.expected[index].abs().max(),
    )
    assert error < (3e-3 if "half" in NAMES[index] else 3e-6) * max(1, float(largest))


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_attention_is_named_once_and_nothing_else(compiled, program):
    found = [reason for reason in reasons(compiled.mod, program) if reason != READ_SCORES]  # of a softmax beside it
    assert len(found) == (program.reason is not None), found
    assert all(program.reason in reason for reason in found)


class Linear(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-1, -2) / 4).tril() @ v


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear()

    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(self.linear(q, k, v), k, v)


class Reordered(nn.Module):
    def forward(self, q, k, v):
        return q @ (k.transpose(-1, -2) @ v)


def states():
    return tuple(torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))


@pytest.mark.parametrize("mask", [masks.sliding_window(2), {"*": masks.causal()}, {"linear": masks.causal()}], ids=str)
def test_a_mask_that_covers_it_is_refused_by_name(mask):
    with pytest.raises(NotRewrittenError, match=r"1 attention\(s\) stay dense.*: linear: .* without a softmax"):
        stof_tvm.build(Both(), QUICK_LLVM, states(), mask)


def test_a_mask_for_others_is_applied():
    class Named(Both):
        def __init__(self):
            super().__init__()
            self.attend = Attend()

        def forward(self, q, k, v):
            return self.attend(self.linear(q, k, v), k, v)

    report = stof_tvm.build(Named(), QUICK_LLVM, states(), {"attend": masks.sliding_window(2)}).report()
    assert {site.site: site.rewritten for site in report.sites} == {"attend": True, "linear": False}


class Attend(nn.Module):
    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)


def test_without_a_mask_it_builds_and_is_reported():
    with pytest.raises(NotRewrittenError, match="without a softmax"):
        stof_tvm.build(Linear(), QUICK_LLVM, states(), strict=True)
    (row,) = stof_tvm.build(Linear(), QUICK_LLVM, states()).report().not_rewritten
    assert "without a softmax" in row.reason


def test_no_scores_are_no_attention():
    with pytest.raises(MaskError, match="reaches no attention"):
        stof_tvm.build(Reordered(), QUICK_LLVM, states(), masks.causal())
