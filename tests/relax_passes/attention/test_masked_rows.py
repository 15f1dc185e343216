"""Rows that a constant and a run-time mask, parted from each other, leave nothing of but finite fills."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stof_tvm
from relax_passes.attention.fold_masks import PARTED_NOTE
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM

B, H, S, D = 3, 2, 12, 8
MIN = torch.finfo(torch.float32).min
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
BAND = (torch.arange(S)[:, None] - torch.arange(S)).abs() <= 2


class Filled(nn.Module):
    """One fill where either mask drops a score: PyTorch forgets what the score was."""

    def __init__(self, pattern, fill):
        super().__init__()
        self.pattern, self.fill = pattern, fill

    def forward(self, q, k, v, keep):
        x = q @ k.transpose(-1, -2) / math.sqrt(D)
        return torch.softmax(x.masked_fill(~(self.pattern & keep), self.fill), -1) @ v


class Added(nn.Module):
    """The same as a float mask of scaled_dot_product_attention."""

    def __init__(self, pattern, fill):
        super().__init__()
        self.pattern, self.fill = pattern, fill

    def forward(self, q, k, v, keep):
        mask = torch.where(self.pattern & keep, 0.0, self.fill)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Twice(nn.Module):
    """Two fills, added up: what both drop is lower than what one does."""

    def __init__(self, pattern, fill):
        super().__init__()
        self.pattern, self.fill = pattern, fill

    def forward(self, q, k, v, keep):
        x = q @ k.transpose(-1, -2) / math.sqrt(D)
        x = x + torch.where(self.pattern, 0.0, self.fill)
        return torch.softmax(x + torch.where(keep, 0.0, self.fill), -1) @ v


class Harder(Twice):
    """The run-time mask fills with -inf: what it keeps and the constant one drops is all that a row may have."""

    def forward(self, q, k, v, keep):
        x = torch.where(keep, q @ k.transpose(-1, -2) / math.sqrt(D), -math.inf)
        return torch.softmax(x + torch.where(self.pattern, 0.0, self.fill), -1) @ v


class HarderLater(Twice):
    def forward(self, q, k, v, keep):
        x = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~self.pattern, self.fill)
        return torch.softmax(x.masked_fill(~keep, -math.inf), -1) @ v


def left_padding():
    keep = torch.ones(B, 1, 1, S, dtype=torch.bool)
    keep[1, ..., :5] = False  # some rows of either pattern keep nothing
    keep[2] = False
    return keep


def some_rows():
    keep = torch.ones(B, 1, S, 1, dtype=torch.bool)
    keep[1, :, 3:7] = False
    return keep


def inputs(keep, factor=1.0):
    q, k, v = torch.randn(3, B, H, S, D, generator=torch.Generator().manual_seed(0))
    return q * factor, k, v, keep


@pytest.mark.parametrize("keep", [left_padding(), some_rows()], ids=["keys", "queries"])
@pytest.mark.parametrize("pattern", [CAUSAL, BAND], ids=["causal", "band"])
@pytest.mark.parametrize("model", [Filled, Added, Twice])
def test_they_are_pytorchs(compile_model, model, pattern, keep):
    compiled = compile_model(model(pattern, MIN), inputs(keep))
    (call,) = compiled.calls.values()
    assert tuple(call.mask.value.shape) == (1, 1, S, S)  # parted
    assert not compiled.mod.attrs["stof.notes"]
    assert compiled.error(0) < 2e-6


@pytest.mark.parametrize("pattern", [CAUSAL, BAND], ids=["causal", "band"])
@pytest.mark.parametrize("model", [Harder, HarderLater])
def test_a_run_time_mask_of_minus_infinity(compile_model, model, pattern):
    keep = left_padding()
    keep[2, ..., 7:9] = True
    compiled = compile_model(model(pattern, MIN), inputs(keep))
    assert compiled.calls and not compiled.mod.attrs["stof.notes"]
    assert compiled.error(0) < 2e-6


def test_what_has_no_known_average_is_not_parted(compile_model):
    class Mixed(nn.Module):
        """A constant mask of both kinds."""

        def forward(self, q, k, v, keep):
            x = (q @ k.transpose(-1, -2)).masked_fill(~BAND, MIN)
            x = torch.where(torch.arange(S)[:, None] < 5, x, -math.inf).masked_fill(~keep, -math.inf)
            return torch.softmax(x, -1)[:, :, :5] @ v

    keep = left_padding()
    keep[2, ..., 7:9] = True
    assert compile_model(Mixed(), inputs(keep)).error(0) < 2e-6


class TwoFills(nn.Module):
    """A constant pattern and a run-time mask that fill with different numbers."""

    def __init__(self, pattern, fills, bias=None):
        super().__init__()
        self.pattern, self.fills, self.bias = pattern, fills, bias

    def forward(self, q, k, v, keep):
        x = q @ k.transpose(-1, -2) / math.sqrt(D) + torch.where(keep, 0.0, self.fills[1])
        x = x if self.bias is None else x + self.bias
        return torch.softmax(x + torch.where(self.pattern, 0.0, self.fills[0]), -1) @ v


@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, S)], ids=["plain", "biased"])
@pytest.mark.parametrize("fills", [(MIN, -1e9), (-1e9, -1e4), (-1e30, -1e9)])
def test_a_higher_fill_at_run_time_weighs_what_the_pattern_keeps(compile_model, fills, bias):
    compiled = compile_model(TwoFills(CAUSAL, fills, bias), inputs(left_padding()))
    (call,) = compiled.calls.values()
    assert tuple(call.mask.value.shape) == (1, 1, S, S)  # parted
    assert not [note for note in compiled.mod.attrs["stof.notes"] if str(note[1]) == PARTED_NOTE]
    assert compiled.error(0) < 2e-6


@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, S)], ids=["plain", "biased"])
@pytest.mark.parametrize("fills", [(-1e9, MIN), (-1e9, -1e30), (-1e9, -1e10)])
def test_a_lower_fill_at_run_time_leaves_what_the_pattern_drops(compile_model, fills, bias):
    compiled = compile_model(TwoFills(BAND, fills, bias), inputs(left_padding()))
    (call,) = compiled.calls.values()
    assert call.mask is None or call.mask.value.numpy().all()
    assert compiled.error(0) < 2e-6


def test_a_pattern_that_is_also_run_time(compile_model):
    """One fill of both, above a lower one at run time: BAND & keep at -1e9, other keys at the least number."""

    class Both(nn.Module):
        def forward(self, q, k, v, keep):
            x = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~keep.flip(-1), MIN)
            return torch.softmax(x + (1.0 - (BAND & keep).to(x.dtype)) * -1e9, -1) @ v

    assert compile_model(Both(), inputs(left_padding())).error(0) < 2e-6


def test_large_scores_are_forgotten(compile_model):
    assert compile_model(Filled(CAUSAL, -1e9), inputs(left_padding(), 1e3)).error(0) < 2e-6


def test_keys_shared_by_heads(compile_model):
    class Shared(nn.Module):
        def forward(self, q, k, v, keep):
            mask = torch.where(CAUSAL & keep, 0.0, MIN)
            return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=mask, enable_gqa=True)

    assert compile_model(Shared(), inputs(left_padding())).error(0) < 2e-6


def test_a_pattern_that_keeps_a_row_nothing_is_no_part(compile_model):
    assert compile_model(Filled(CAUSAL.tril(-1), MIN), inputs(left_padding())).error(0) < 2e-6


@pytest.mark.parametrize("model", [Filled, Twice])
def test_with_a_given_mask_they_are_zero(model):
    q, k, v, keep = inputs(left_padding())
    band = masks.sliding_window(2)
    out = stof_tvm.build(model(CAUSAL, MIN), QUICK_LLVM, (q, k, v, keep), band, verify=False)(q, k, v, keep)
    kept = CAUSAL & keep & band.dense(S)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    assert (out[1, :, :5] == 0).all() and (out[2] == 0).all()
