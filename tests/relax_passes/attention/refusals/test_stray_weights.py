"""Weights that meet the values in other ways than weights · values: reported, so that no given mask passes them by."""

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN, READ_SCORES, CanonicalizeAttention
from relax_passes.attention.refusals.stray_weights import STRAY_WEIGHTS
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from stof_tvm.frontend import import_model
from tests.models.quick_llvm import QUICK_LLVM

B, H, S, D = 2, 2, 9, 4
NO_SOFTMAX = "which is no softmax"


def weights(q, k):
    return (q @ k.mT).softmax(-1)


def by_top_weights(q, k, v):
    found = weights(q, k).topk(3, -1)
    values = v[:, :, None].expand(B, H, S, S, D).gather(3, found.indices[..., None].expand(B, H, S, 3, D))
    return (found.values[..., None] * values).sum(3)


def by_parts(scores, v):
    return (scores.softmax(-1)[..., None] * v[:, :, None]).sum(-2)


def mixed(scores):
    return F.linear(scores.permute(0, 2, 3, 1), torch.ones(H, H)).permute(0, 3, 1, 2)


def by_distance(scores, v):
    return (torch.exp(scores - scores.logsumexp(-1, keepdim=True))[..., None] * v[:, :, None]).sum(3)


def off_by_one(scores):
    return scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))


def entropy(scores):
    return (scores.log_softmax(-1) * scores.softmax(-1)).sum(-1)


def additive(q, k):
    return torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(-1).softmax(-1)


def merged(q, k, v, gate):
    """Two attentions that are merged by the logsumexp of their scores, as parts of one are."""
    (first, one), (second, two) = (((q @ x.mT).softmax(-1) @ v, (q @ x.mT).logsumexp(-1, keepdim=True)) for x in (k, v))
    return gate(one, two) * first + gate(two, one) * second


def chosen(q, k, v, keep, again=False):
    """Attention to the keys that a function of all scores of a row keeps; `again` computes these once more."""
    scores = q @ k.mT * 0.3
    kept = keep((q @ k.mT * 0.3) if again else scores)
    return scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v


def of_the_largest(scores):
    return scores >= scores.topk(3, -1).values[..., -1:]


def with_scores(q, k, v, function):
    scores = q @ k.mT * 0.3
    return function(scores, scores.softmax(-1) @ v)


def repeated(q, k, function):
    """Scores of what is repeated before it meets: (B, H, S, S, D) of each query and of each key."""
    shape = (B, H, S, S, D)
    return function(q[:, :, :, None].expand(shape), k[:, :, None].expand(shape))


def graph_attention(q, v):
    """Rows repeated in both ways, joined, and projected to a number."""
    x, one = q[0, 0], torch.ones(1, 2 * D)
    pairs = torch.cat((x.repeat_interleave(S, 0), x.repeat(S, 1)), 1).view(S, S, 2 * D)
    return F.leaky_relu(F.linear(pairs, one).squeeze(-1)).softmax(-1) @ v


# Scores of attention that would be recognised if nothing else read them.
READ = {
    "merged by a sigmoid": lambda q, k, v: merged(q, k, v, lambda a, b: (a - b).sigmoid()),
    "merged by a softmax": lambda q, k, v: merged(q, k, v, lambda a, b: torch.cat((a, b), -1).softmax(-1)[..., :1]),
    "lerp": lambda q, k, v: with_scores(
        q, k, v, lambda s, o: torch.lerp(o, v, s.logsumexp(-1, keepdim=True).sigmoid())
    ),
    "gate by the mean": lambda q, k, v: with_scores(q, k, v, lambda s, o: o * s.mean(-1, True).sigmoid()),
    "factor of the maximum": lambda q, k, v: with_scores(
        q, k, v, lambda s, o: F.layer_norm(o, (D,)) * s.amax(-1, True)
    ),
    "returned logsumexp": lambda q, k, v: with_scores(q, k, v, lambda s, o: (o, s.logsumexp(-1))),
    "chain of two": lambda q, k, v: (weights(q, k) @ weights(k, v)) @ v,
    "returned scores": lambda q, k, v: with_scores(q, k, v, lambda s, o: (o, s)),
    "masked by the largest few": lambda q, k, v: chosen(q, k, v, of_the_largest),
    "masked by the largest few, computed twice": lambda q, k, v: chosen(q, k, v, of_the_largest, again=True),
    "masked above the mean": lambda q, k, v: chosen(q, k, v, lambda s: s > s.mean(-1, True)),
    "biased by itself": lambda q, k, v: (q @ k.mT + (q @ k.mT).square()).softmax(-1) @ v,
}
STRAY = {
    "graph attention": lambda q, k, v: graph_attention(q, v),
    "sums of what is expanded": lambda q, k, v: repeated(q, k, lambda a, b: (a + b).tanh().sum(-1)).softmax(-1) @ v,
    "joined by an MLP": lambda q, k, v: (
        repeated(q, k, lambda a, b: F.linear(torch.cat((a, b), -1), torch.ones(1, 2 * D)).squeeze(-1)).softmax(-1) @ v
    ),
    "cosines of pairs": lambda q, k, v: F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1).softmax(-1) @ v,
    "values of another attention": lambda q, k, v: weights(q, k) @ weights(k, q),
    "values made of weights": lambda q, k, v: weights(q, k) @ weights(k, q).tanh(),
    "values times weights": lambda q, k, v: weights(q, k) @ (weights(k, q)[..., :D] * v),
    "queries of an attention": lambda q, k, v: F.scaled_dot_product_attention(weights(q, k), weights(v, k), v),
    "bias of an attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=weights(q, k)),
    "product and sum": lambda q, k, v: (weights(q, k)[..., None] * v[:, :, None]).sum(-2),
    "product and maximum": lambda q, k, v: (weights(q, k)[..., None] * v[:, :, None]).amax(-2),
    "einsum of three": lambda q, k, v: torch.einsum("bhij,bhjd,de->bhie", weights(q, k), v, torch.ones(D, 3)),
    "scores of three": lambda q, k, v: torch.einsum("bhid,d,bhjd->bhij", q, torch.ones(D), k).softmax(-1) @ v,
    "mixed heads": lambda q, k, v: torch.einsum("bhij,bgjd->bgid", weights(q, k), v),
    "mean of heads": lambda q, k, v: weights(q, k).mean(1, keepdim=True) @ v,
    "scores mixed by an einsum": lambda q, k, v: by_parts(torch.einsum("bhij,hg->bgij", q @ k.mT, torch.ones(H, H)), v),
    "scores mixed by a layer": lambda q, k, v: by_parts(mixed(q @ k.mT), v),
    "in parts": lambda q, k, v: weights(q, k)[..., :4] @ v[:, :, :4] + weights(q, k)[..., 4:] @ v[:, :, 4:],
    "from the right": lambda q, k, v: F.linear(v.mT, weights(q, k)[0, 0]),
    "the largest few": by_top_weights,
    "turned": lambda q, k, v: weights(q, k).roll(1, -1) @ v,
    "mean of queries": lambda q, k, v: weights(q, k).mean(-2, keepdim=True) @ v,
    "sum of queries": lambda q, k, v: weights(q, k).sum(-2)[..., None] * v,
    "additive scores": lambda q, k, v: (additive(q, k)[..., None] * v[:, :, None]).sum(-2),
    "the best key": lambda q, k, v: v.gather(2, (q @ k.mT).argmax(-1)[..., None].expand(B, H, S, D)),
    "values of one number": lambda q, k, v: ((q @ k.mT).sigmoid()[..., None] * v[:, :, None, :, :1]).sum(-2),
    "exponentials of distances": lambda q, k, v: by_distance(-torch.cdist(q, k).square(), v),
    "off by one, one number": lambda q, k, v: (off_by_one(q @ k.mT)[..., None] * v[:, :, None, :, :1]).sum(-2),
    "sigmoid, product and sum": lambda q, k, v: ((q @ k.mT).sigmoid()[..., None] * v[:, :, None]).sum(-2),
}
NONE = {
    "less its maximum": lambda q, k, v: (q @ k.mT - (q @ k.mT).amax(-1, True)).softmax(-1) @ v,
    "biased by queries": lambda q, k, v: (q @ k.mT + q @ torch.ones(D, S)).softmax(-1) @ v,
    "masked by queries": lambda q, k, v: chosen(q, k, v, lambda s: q.sum(-1, True) < k.sum(-1)[:, :, None]),
    "similarities": lambda q, k, v: (weights(q, k), v),
    "entropy": lambda q, k, v: entropy(q @ k.mT),
    "pooling behind attention": lambda q, k, v: ((weights(q, k) @ v @ torch.ones(D, 1)).softmax(-2) * v).sum(-2),
    "router": lambda q, k, v: (q @ torch.ones(D, 3)).softmax(-1)[..., None] * v[..., None, :],
    "learned query": lambda q, k, v: ((q @ torch.ones(D, 1)).softmax(-2) * v).sum(-2),
    "gate of a product": lambda q, k, v: (q @ (k.mT @ v)).sigmoid() * v,
    "relu of similarities": lambda q, k, v: ((q @ k.mT).relu(), v),
    "scaled pooling": lambda q, k, v: (
        (q.sum(-1, True) / q.norm(dim=-1, keepdim=True).amax(2, True)).softmax(2) * v
    ).sum(2),
    "conditioned pooling": lambda q, k, v: (
        (q.mean(2, True).expand(B, H, S, D) * k.sum(-1, True).expand(B, H, S, D)).sum(-1).softmax(-1)[..., None] * v
    ).sum(2),
    "tokens and a summary": lambda q, k, v: (
        torch.cat((q, k.mean(2, True).expand(B, H, S, D)), -1).softmax(-1)[..., :D] * v
    ),
    "norm of similarities": lambda q, k, v: (q @ k.mT).square().sum((-1, -2)),
}


class Program(torch.nn.Module):
    def __init__(self, function, beside=False):
        super().__init__()
        self.function, self.beside = function, beside

    def forward(self, q, k, v):
        out = self.function(q, k, v)
        return (out, weights(q * 0.5, k) @ v) if self.beside else out


def inputs():
    return tuple(torch.randn(3, B, H, S, D, generator=torch.Generator().manual_seed(0)))


def reasons_of(function):
    after = CanonicalizeAttention()(import_model(Program(function), inputs()).mod)
    return [str(reason) for _, reason in after.attrs[NOT_REWRITTEN]]


@pytest.mark.parametrize("name", STRAY)
def test_weights_that_meet_the_values_are_reported(name):

    reasons = reasons_of(STRAY[name])
    assert reasons and all(
        "values" in reason or NO_SOFTMAX in reason or "queries and keys" in reason for reason in reasons
    ), reasons


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_attention_is_not(name):
    assert reasons_of(NONE[name]) == []


@pytest.mark.parametrize("name", READ)
def test_scores_that_something_else_reads_are_reported(name):
    assert reasons_of(READ[name])


@pytest.mark.parametrize("name", ["factor of the maximum", "returned scores"])
def test_a_given_mask_does_not_pass_by_what_else_reads_the_scores(name):
    with pytest.raises(NotRewrittenError, match=READ_SCORES):
        stof_tvm.build(Program(READ[name]), QUICK_LLVM, inputs(), masks.causal())


def test_a_given_mask_does_not_pass_by():
    with pytest.raises(NotRewrittenError, match=STRAY_WEIGHTS):
        stof_tvm.build(Program(STRAY["product and sum"], beside=True), QUICK_LLVM, inputs(), masks.causal())
