"""Blocks that an engine found are compared with PyTorch's: near ties pass, others do not."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.rules.near_ties import near_ties
from stof_tvm.rules.traced import TracedRule
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rules.rule_models import EVERY_RULE, RULES, Attend, Decoder, hidden, tensors
from tir_kernels.errors import VerificationError

TOP = EVERY_RULE["top_blocks"]


def test_another_rule_in_the_graph_is_found(monkeypatch):
    """The kernel is right with the blocks that it gets, but these are not the rule's."""
    other = TracedRule(RULES.rule(lambda q, k: ~TOP.function(q, k), block=32), "", {})
    traced = TracedRule.traced
    monkeypatch.setattr(TracedRule, "traced", lambda self, *operands: traced(other, *operands))
    with pytest.raises(VerificationError, match=r"'layers.0.attend': \d+ of 200 blocks .*top_blocks.*turn \d+ of them"):
        stof_tvm.build(Decoder((None,)), QUICK_LLVM, (hidden(),), TOP)


def test_near_ties_pass_and_other_blocks_do_not():
    q, k, _ = tensors()
    k = k[:, :, :64].repeat(1, 1, 2, 1)  # blocks of keys are equal two by two, and so are their scores
    rule = RULES.top_blocks(1, block=64)
    kept = rule.block_map(q, k)
    assert near_ties("", rule, kept, q, k, 1e-5) == 0
    tied = kept.flip(-1)
    assert near_ties("", rule, tied, q, k, 1e-5) == 2 * kept.sum()
    clear = k * torch.tensor([1.0, 2.0]).repeat_interleave(64)[:, None]
    kept = rule.block_map(q.abs(), clear.abs())
    with pytest.raises(VerificationError, match=f"{2 * kept.sum()} of {kept.numel()} blocks"):
        near_ties("", rule, kept.flip(-1), q.abs(), clear.abs(), 1e-5)


def test_zeros_tie():
    q, k, v = (torch.zeros_like(x) for x in tensors())
    engine = stof_tvm.build(Attend(), QUICK_LLVM, (q, k, v), TOP)
    assert engine.report().verification.result == "passed"


class ByHand(torch.nn.Module):
    """A softmax written out, of which PyTorch's graph does not say what the queries and keys are."""

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT * 0.3, -1) @ v


def test_what_is_not_compared_is_said():
    q, _, _ = tensors()
    engine = stof_tvm.build(ByHand(), QUICK_LLVM, (q, q, q), TOP)
    found = engine.report().verification
    assert found.result == "passed" and "those of (the model) were not compared" in found.detail
    expected = Attend(scale=0.3, rule=TOP)(q, q, q)
    torch.testing.assert_close(engine(q, q, q), expected, atol=1e-5, rtol=0)


def test_repeated_heads_of_keys_are_taken_back():
    """The kernel shares keys that the model repeats, and so the rule sees few heads of them."""

    class Repeated(torch.nn.Module):
        def forward(self, q, k, v):
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def two_heads(q, k):
        assert k.shape[1] == 2
        return masks.runtime.top_blocks(2, block=32).function(q, k)

    engine = stof_tvm.build(Repeated(), QUICK_LLVM, tensors(), masks.runtime.rule(two_heads, block=32))
    assert "as PyTorch" in engine.report().verification.detail
