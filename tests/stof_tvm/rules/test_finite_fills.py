"""A rule beside a model's own masks of finite fills: it restricts as the static mask of the same blocks does."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stof_tvm
from relax_passes.attention.fold_masks import PARTED_NOTE
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rules.rule_models import RULES

BATCH, HEADS, LENGTH, SIZE = 2, 2, 96, 16
MIN = torch.finfo(torch.float32).min
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


class Spelled(nn.Module):
    """An attention whose scores `spelling` masks; which keys are no padding follows from an input."""

    def __init__(self, spelling, left):
        super().__init__()
        self.spelling, self.left = spelling, left

    def real(self, n):
        places = torch.arange(LENGTH)
        return (places >= n[:, None] if self.left else places < n[:, None])[:, None, None]

    def forward(self, q, k, v, n):
        return self.spelling(q, k, v, self.real(n))


def softmax_of(masked):
    """A softmax written out over scores that a function masks."""
    return lambda q, k, v, real: torch.softmax(masked(q @ k.mT / math.sqrt(SIZE), real), -1) @ v


def sdpa_with(bias):
    """SDPA with the additive mask that a function makes."""
    return lambda q, k, v, real: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias(real))


SPELLINGS = {
    "filled twice": softmax_of(lambda s, real: s.masked_fill(~CAUSAL, -1e9).masked_fill(~real, -1e9)),
    "filled once": softmax_of(lambda s, real: s.masked_fill(~(CAUSAL & real), MIN)),
    "added twice": softmax_of(lambda s, real: s + torch.where(CAUSAL, 0.0, -1e9) + torch.where(real, 0.0, -1e9)),
    "where": softmax_of(lambda s, real: torch.where(CAUSAL & real, s, -1e9)),
    "SDPA, one fill": sdpa_with(lambda real: torch.where(CAUSAL & real, 0.0, MIN)),
    "SDPA, filled twice": sdpa_with(
        lambda real: torch.zeros(LENGTH, LENGTH).masked_fill(~CAUSAL, MIN).masked_fill(~real, MIN)
    ),
    "filled, then -inf": softmax_of(lambda s, real: s.masked_fill(~CAUSAL, MIN).masked_fill(~real, -math.inf)),
}
GIVEN = {
    "top": RULES.top_blocks(1, block=32),
    "top, causal": RULES.top_blocks(1, block=32, causal=True),
    "top of a window": RULES.top_blocks(2, block=32) & masks.sliding_window(40),
    "sparge": RULES.sparge(0.5, similarity=-1, block=32),
    "per head": RULES.per_head([RULES.top_blocks(1, block=32), masks.sliding_window(8)]),
}


def inputs(left, seed=0):
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(seed))
    return q, k, v, torch.tensor([0, 50] if left else [LENGTH, 20])


def kept_by(rule, q, k):
    return rule.mask(q, k).dense(LENGTH)


def restricted(call, kept):
    """The attention of the pairs that are kept; 0 for rows of nothing."""
    q, k, v, _ = call
    scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(~kept, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(
    "spelling, given",
    [*((spelling, "top, causal") for spelling in SPELLINGS), *(("filled twice", rule) for rule in GIVEN)],
)
def test_rows_of_which_model_and_rule_keep_nothing_are_0(spelling, given, left):
    model, rule, call = Spelled(SPELLINGS[spelling], left), GIVEN[given], inputs(left)
    own = CAUSAL & model.real(call[-1])
    kept = kept_by(rule, *call[:2]) & own
    assert (own.any(-1) & ~kept.any(-1)).any()  # otherwise this shows nothing
    engine = stof_tvm.build(model, QUICK_LLVM, call, rule)
    assert engine.report().verification.result == "passed"
    expected = restricted(call, kept)
    if spelling == "filled, then -inf":  # a row of -inf alone is PyTorch's NaN
        expected = torch.where(model.real(call[-1]).any(-1, keepdim=True), expected, math.nan)
    torch.testing.assert_close(engine(*call), expected, atol=1e-5, rtol=0, equal_nan=True)
    other = inputs(left, seed=1)
    expected = restricted(other, kept_by(rule, *other[:2]) & own)
    torch.testing.assert_close(engine(*other), expected, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_rows_that_run_time_padding_alone_fills_average_over_what_the_rule_keeps(left):
    """As with a static mask: the model has no constant mask that could empty them."""
    rule, call = RULES.top_blocks(1, block=32), inputs(left)
    model = Spelled(softmax_of(lambda s, real: s.masked_fill(~real, -1e9)), left)
    kept, real = kept_by(rule, *call[:2]), model.real(call[-1])
    empty = ~(kept & real).any(-1, keepdim=True)
    assert empty.any()
    average = kept / kept.sum(-1, keepdim=True) @ call[2]
    engine = stof_tvm.build(model, QUICK_LLVM, call, rule)
    expected = torch.where(empty, average, restricted(call, kept & real))
    torch.testing.assert_close(engine(*call), expected, atol=1e-5, rtol=0)


def test_padding_that_a_bias_accompanies_is_told():
    """Rows of padding alone are then averages over it, with a rule as with a static mask, and as the report says."""
    learned = 0.1 * torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))

    class Biased(Spelled):
        def forward(self, q, k, v, n):
            bias = learned * n.sum()  # known at run time only
            return self.spelling(q, k, v, (self.real(n), bias))

    def masked(scores, known):
        real, bias = known
        return scores + bias + torch.where(CAUSAL, 0.0, -1e9) + torch.where(real, 0.0, -1e9)

    rule, call = GIVEN["top, causal"], inputs(left=False)
    found = []
    for given in (rule, rule.mask(*call[:2])):
        engine = stof_tvm.build(Biased(softmax_of(masked), False), QUICK_LLVM, call, given, verify=False)
        assert PARTED_NOTE in engine.report().rewritten[0].notes
        found.append(engine(*call))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


class Bounded(nn.Module):
    """Scores with a known bound and a bias that puts far keys so far below near ones that their weight is 0."""

    def forward(self, q, k, v):
        places = torch.arange(LENGTH)
        scores = torch.tanh(q) @ torch.tanh(k).mT - 20.0 * (places[:, None] - places).abs()
        return torch.softmax(scores, -1) @ v


def test_a_key_counts_that_is_the_nearest_of_those_that_the_rule_keeps():
    q, k, v, _ = inputs(left=False)
    rule = RULES.rule(lambda q, k: (torch.arange(3) == 2 - torch.arange(3)[:, None])[None, None], block=32)
    kept = rule.mask(q, k).dense(LENGTH)
    engine = stof_tvm.build(Bounded(), QUICK_LLVM, (q, k, v), rule)
    places = torch.arange(LENGTH)
    scores = torch.tanh(q) @ torch.tanh(k).mT - 20.0 * (places[:, None] - places).abs()
    expected = scores.masked_fill(~kept, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(engine(q, k, v), expected, atol=1e-5, rtol=0)
