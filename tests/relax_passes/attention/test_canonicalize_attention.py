"""Spellings by hand against PyTorch's numbers, the form they get, and what is left alone."""

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN, CanonicalizeAttention
from relax_passes.attention.composite import NOTES, emit_attention
from stof_tvm.frontend import import_model
from tests.relax_passes.attention.spelled import SPELLINGS

TOLERANCE = {"float32_softmax": 3e-2, "scores_in_float32": 3e-3}  # these compute in half precision


@pytest.mark.parametrize("index", range(len(SPELLINGS)), ids=[s.function.__name__ for s in SPELLINGS])
def test_a_spelling_becomes_the_composite_and_keeps_its_numbers(canonical_spellings, index):
    spelling = SPELLINGS[index]
    name = spelling.function.__name__
    call = canonical_spellings.calls[name]
    assert call.spelling == spelling.name
    assert int(call.k.ty.shape[1]) == int(call.v.ty.shape[1]) == spelling.kv_heads
    assert canonical_spellings.error(index) < TOLERANCE.get(name, 2e-6)


def test_nothing_of_the_table_is_left(canonical_spellings):
    assert len(canonical_spellings.calls) == len(SPELLINGS)
    assert len(canonical_spellings.mod.attrs[NOT_REWRITTEN]) == 0
    assert "nn.softmax" not in canonical_spellings.mod["main"].script()


def test_scales_multiply_into_one(canonical_spellings):
    scale = {name: call.scale for name, call in canonical_spellings.calls.items()}
    assert scale["scale_on_q"] == pytest.approx(0.3)
    assert scale["scale_on_both"] == pytest.approx(0.5 / 1.5)
    assert scale["scale_after_mask"] == pytest.approx(0.25)
    assert scale["baddbmm"] == pytest.approx(0.25)


# -- before and expected --------------------------------------------------------------------------------------------


@I.ir_module
class Before:
    @R.function
    def main(
        q: R.Tensor((2, 3, 5, 8), "float32"),
        k: R.Tensor((2, 3, 7, 8), "float32"),
        v: R.Tensor((2, 3, 7, 4), "float32"),
        keep: R.Tensor((5, 7), "bool"),
        bias: R.Tensor((3, 1, 7), "float32"),
    ) -> R.Tensor((2, 3, 5, 4), "float32"):
        with R.dataflow():
            kt = R.permute_dims(k, [0, 1, 3, 2])
            scores = R.matmul(q, kt)
            scaled = R.divide(scores, R.const(4.0, "float32"))
            biased = R.add(bias, scaled)
            masked = R.where(keep, biased, R.const(float("-inf"), "float32"))
            weights = R.nn.softmax(masked, axis=3)
            out = R.matmul(weights, v)
            R.output(out)
        return out


def test_expected():
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, p.ty) for p in Before["main"].params]
    q, k, v, keep, bias = params
    with builder.function("main", params):
        with builder.dataflow():
            bias = builder.emit(relax.op.reshape(bias, (1, 3, 1, 7)))
            keep = builder.emit(relax.op.reshape(keep, (1, 1, 5, 7)))
            out = emit_attention(
                builder, q, k, v, mask=keep, bias=bias, scale=0.25, empty_rows="nan", spelling="softmax(add+where)"
            )
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    expected = builder.finalize().with_attr(NOT_REWRITTEN, []).with_attr(NOTES, [])
    tvm.ir.assert_structural_equal(CanonicalizeAttention()(Before), expected)


# -- rejections -----------------------------------------------------------------------------------------------------


class Rejected(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Module()
        self.layer.forward = function

    def forward(self, q, k, v):
        return self.layer(q, k, v)


def scores(q, k):
    return q @ k.transpose(-1, -2)


def averaged(q, k, v):
    weights = torch.softmax(scores(q, k), -1)
    return weights @ v, weights.mean(1)


def bounded_after_a_bias(q, k, v):
    return torch.softmax(torch.tanh((scores(q, k) + torch.arange(6.0)) / 50) * 50, -1) @ v


def temperature_per_pair(q, k, v):
    return torch.softmax(scores(q, k) * torch.arange(36.0).reshape(6, 6), -1) @ v


def filled_with_zero(q, k, v):
    return torch.softmax(scores(q, k).masked_fill(torch.ones(6, 6).tril() == 0, 0.0), -1) @ v


def negative_scale_after_mask(q, k, v):
    mask = torch.where(torch.ones(6, 6).tril() > 0, 0.0, 1e9)
    return torch.softmax((scores(q, k) + mask) * -0.5, -1) @ v


def normalised_weights(q, k, v):
    weights = torch.softmax(scores(q, k), -1)
    return (weights / (1e-9 + weights.sum(1, keepdim=True))) @ v


def head_mask(q, k, v):
    return (torch.softmax(scores(q, k), -1) * torch.tensor([1.0, 0.0, 1.0])[:, None, None]) @ v


def keys_shared_by_the_batch(q, k, v):
    return torch.softmax(scores(q, k[:1]), -1) @ v


REJECTED = {
    averaged: "another reader",
    bounded_after_a_bias: "relax.tanh stands between",
    temperature_per_pair: "a number for each pair",
    filled_with_zero: "where replaces scores by 0",
    negative_scale_after_mask: "multiplied by -0.5",
    normalised_weights: "another reader",
    head_mask: "stands between the softmax and the values",
    keys_shared_by_the_batch: "shared by all batches",
}


@pytest.mark.parametrize("function", REJECTED, ids=lambda f: f.__name__)
def test_what_the_composite_cannot_express_is_left_and_reported(compile_model, function):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 4, generator=generator) for _ in range(3))
    compiled = compile_model(Rejected(function), (q, k, v), passes=[CanonicalizeAttention()])
    assert compiled.calls == {}
    ((site, reason),) = compiled.mod.attrs[NOT_REWRITTEN]
    assert REJECTED[function] in reason, reason
    assert compiled.error(0) < 2e-6


@I.ir_module
class NotAttention:
    @R.function
    def main(
        x: R.Tensor((2, 6, 8), "float32"), w: R.Tensor((8, 5), "float32"), u: R.Tensor((5, 8), "float32")
    ) -> R.Tensor((2, 6, 8), "float32"):
        with R.dataflow():
            gates = R.matmul(x, w)
            weights = R.nn.softmax(gates, axis=-1)
            out = R.matmul(weights, u)
            R.output(out)
        return out


@I.ir_module
class SoftmaxOverRows:
    @R.function
    def main(
        q: R.Tensor((2, 6, 8), "float32"), k: R.Tensor((2, 8, 6), "float32"), v: R.Tensor((2, 6, 8), "float32")
    ) -> R.Tensor((2, 6, 8), "float32"):
        with R.dataflow():
            scores = R.matmul(q, k)
            weights = R.nn.softmax(scores, axis=1)
            out = R.matmul(weights, v)
            R.output(out)
        return out


@pytest.mark.parametrize("module", [NotAttention, SoftmaxOverRows], ids=["projections", "softmax over rows"])
def test_other_softmaxes_are_left_alone(module):
    """Between products of states it is reported: a mask that is given for it would be lost."""
    after = CanonicalizeAttention()(module)
    tvm.ir.assert_structural_equal(after["main"], module["main"])
    reasons = [str(reason) for _, reason in after.attrs[NOT_REWRITTEN]]
    assert reasons == (["its softmax is over dimension 1, not over the keys"] if module is SoftmaxOverRows else [])


@I.ir_module
class Symbolic:
    @R.function
    def main(
        q: R.Tensor(("b", 6, 8), "float32"), k: R.Tensor(("b", 8, 6), "float32"), v: R.Tensor(("b", 6, 8), "float32")
    ) -> R.Tensor(("b", 6, 8), "float32"):
        with R.dataflow():
            scores = R.matmul(q, k)
            weights = R.nn.softmax(scores, axis=-1)
            out = R.matmul(weights, v)
            R.output(out)
        return out


def test_symbolic_lengths_are_reported():
    after = CanonicalizeAttention()(Symbolic)
    tvm.ir.assert_structural_equal(after["main"], Symbolic["main"])
    assert "symbolic" in after.attrs[NOT_REWRITTEN][0][1]


class HeadsFirst(nn.Module):
    """(heads, batch, length, dim) made of (batch, length, features)."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 3, 0, 1, 4)
        return torch.softmax(q @ k.mT, -1) @ v


@pytest.mark.parametrize("heads, batch, is_refused", [(3, 3, True), (3, 2, False), (1, 1, False)])
def test_heads_that_cannot_be_told_from_batches(heads, batch, is_refused):
    """A mask of several heads would meet the batch: nothing but the place tells them apart."""
    x = torch.randn(batch, 7, 24)
    mod = CanonicalizeAttention()(import_model(HeadsFirst(heads), (x,)).mod)
    reasons = [str(reason) for _, reason in mod.attrs["stof.not_rewritten"]]
    assert bool(reasons) == is_refused and all("heads come before its batch" in reason for reason in reasons)


def test_weights_that_are_inputs_make_heads_as_well():
    """As under torch.compile."""

    class Given(nn.Module):
        def forward(self, x, weight):
            q, k, v = nn.functional.linear(x, weight).unflatten(-1, (3, 3, 8)).permute(2, 3, 0, 1, 4)
            return torch.softmax(q @ k.mT, -1) @ v

    given = torch.randn(3, 7, 24), nn.Parameter(torch.randn(72, 24), requires_grad=False)
    mod = CanonicalizeAttention()(import_model(Given(), given).mod)
    assert [str(reason) for _, reason in mod.attrs["stof.not_rewritten"]]


def test_batches_that_are_as_many_as_heads():
    class BatchFirst(HeadsFirst):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return torch.softmax(q @ k.mT, -1) @ v

    mod = CanonicalizeAttention()(import_model(BatchFirst(3), (torch.randn(3, 7, 24),)).mod)
    assert not mod.attrs["stof.not_rewritten"]
