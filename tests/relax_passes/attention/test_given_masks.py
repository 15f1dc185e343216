"""A mask that the user gives, beside what a model itself has: it applies to every attention, or is refused."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import stof_tvm
from relax_passes.attention import fold_masks
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM

B, H, S, D = 2, 3, 16, 8
DISTANCE = (torch.arange(S)[:, None] - torch.arange(S)).abs()
BIASES = {
    "ALiBi": -50.0 * DISTANCE,
    "random": 300.0 * torch.randn(S, S, generator=torch.Generator().manual_seed(0)),
    "of the key": -500.0 * torch.arange(S),
    "of the head": 1000.0 * torch.randn(H, 1, S, generator=torch.Generator().manual_seed(1)),
}
GIVEN = {
    "near": masks.sliding_window(2),
    "far": ~masks.sliding_window(3),
    "of the head": masks.per_head([masks.causal(), masks.sliding_window(1), ~masks.causal()]),
}


class Bounded(nn.Module):
    """Scores with a known bound: a bias may put a key so far below another that its weight is 0."""

    def __init__(self, bias):
        super().__init__()
        self.register_buffer("bias", bias)

    def scores(self, q):
        return torch.tanh(q) @ torch.tanh(q).mT + self.bias

    def forward(self, q):
        return self.scores(q).softmax(-1) @ q


@pytest.mark.parametrize(
    "bias, given",
    [*((bias, "far") for bias in BIASES), ("random", "near"), ("of the key", "of the head"), ("ALiBi", "of the head")],
)
def test_a_key_counts_that_is_the_highest_of_those_that_are_kept(bias, given):
    """What the bias puts far below a key that the mask drops may be all that a row has."""
    q = torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(2))
    model, mask = Bounded(BIASES[bias]), GIVEN[given]
    engine = stof_tvm.build(model, target=QUICK_LLVM, example_inputs=(q,), mask=mask, verify=False)
    weights = model.scores(q).masked_fill(~mask.dense(S), -math.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(engine(q), weights @ q, atol=1e-4, rtol=0)


COMPARED = {
    "cdist": lambda q, k: -torch.cdist(q, k),
    "differences": lambda q, k: -(q[:, :, :, None] - k[:, :, None]).square().sum(-1),
    "sums": lambda q, k: torch.tanh(q[:, :, :, None] + k[:, :, None]).mean(-1),
}
SINKS = {
    "last column": lambda s, sink: torch.cat([s, sink], -1).softmax(-1)[..., :-1],
    "first column": lambda s, sink: torch.cat([sink, s], -1).softmax(-1)[..., 1:],
    "column of halves": lambda s, sink: torch.cat([s, sink], -1).softmax(-1)[..., :-1].half().float(),
    "split off": lambda s, sink: torch.cat([s, sink], -1).softmax(-1).split([S, 1], -1)[0],
    "two columns": lambda s, sink: torch.cat([s, sink, sink], -1).softmax(-1)[..., :-2],
    "padding": lambda s, sink: functional.pad(s, (0, 1)).softmax(-1)[..., :-1],
    "term": lambda s, sink: s.exp() / (s.exp().sum(-1, keepdim=True) + sink.exp()),
}


class Two(nn.Module):
    """An attention of the kernels, and one whose scores are no products."""

    def __init__(self, compared, sink):
        super().__init__()
        self.compared, self.sink = compared, sink
        self.register_buffer("logit", torch.randn(1, H, 1, 1))

    def forward(self, q, k, v):
        weights = self.sink(self.compared(q, k), self.logit.expand(B, H, S, 1))
        return weights @ v, functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("sink, compared", [*zip(SINKS, itertools.cycle(COMPARED)), ("two columns", "cdist")])
def test_an_attention_that_a_mask_cannot_reach_is_refused_beside_one_that_it_can(compared, sink):
    q, k, v = torch.randn(3, B, H, S, D)
    with pytest.raises(NotRewrittenError, match="the given mask cannot be applied"):
        stof_tvm.build(Two(COMPARED[compared], SINKS[sink]), QUICK_LLVM, (q, k, v), masks.causal())


def test_a_mask_too_large_to_be_held_drops_no_key_that_may_count(monkeypatch):
    monkeypatch.setattr(fold_masks, "LARGEST_SUMS", 1)
    test_a_key_counts_that_is_the_highest_of_those_that_are_kept("ALiBi", "far")
