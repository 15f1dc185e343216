"""Scores multiplied by tensors: a number for each head, query or key multiplies q or k; one for each pair does not.

Inputs as in near_misses.py.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.near_misses import BELOW, MIN, SLOPE, TRIL, B, H, S
from tests.relax_passes.attention.programs import attend, program_list, scores

PROGRAMS, program = program_list()
HEADS = torch.tensor([[[0.3]], [[5.5]]])
QUERIES = torch.linspace(-1.0, 2.0, S)[:, None]
KEYS = torch.linspace(0.5, 3.0, S)
PAIRS = torch.linspace(0.5, 3.0, S * S).reshape(S, S)


def of(numbers, q):
    return numbers.to(q.dtype)


# -- of heads ---------------------------------------------------------------------------------------------------------


@program
def cosine(q, k, v, keep, added):
    """Swin v2."""
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    return attend(q @ k.transpose(-2, -1) * of(HEADS, q).clamp(max=math.log(100.0)).exp() + of(PAIRS, q), v)


@program
def of_each_head(q, k, v, keep, added):
    return attend((of(HEADS, q) * scores(q, k)).masked_fill(~BELOW, -math.inf), v)


@program
def of_each_head_by_einsum(q, k, v, keep, added):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x = torch.einsum("bihd,bjhd->bhij", q, k) / of(HEADS, q)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(x, -1), v).transpose(1, 2)


@program
def of_each_head_folded(q, k, v, keep, added):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    x = torch.bmm(q, k.mT) * of(HEADS, q).repeat(B, 1, 1)
    return torch.bmm(torch.softmax(x, -1), v).view(B, H, S, -1)


@program
def of_each_head_before_a_reshape(q, k, v, keep, added):
    x = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, S, S) * of(HEADS, q).expand(B, H, S, S)
    return attend(x + of(SLOPE, q), v)


@program
def transposed(q, k, v, keep, added):
    x = scores(k, q) * of(HEADS, q)
    return torch.softmax(x, -2).transpose(-1, -2) @ v


@program
def capped(q, k, v, keep, added):
    return attend(torch.tanh(scores(q, k) * of(HEADS, q) / 3) * 3, v)


@program
def of_keys_that_heads_share(q, k, v, keep, added):
    return attend(scores(q, k[:, :1]) * of(HEADS, q) * of(KEYS, q), v[:, :1])


@program
def of_each_head_for_each_shared_key(q, k, v, keep, added):
    return attend(scores(q, k[:, :1]) * (of(HEADS, q) * of(KEYS, q)), v[:, :1])


# -- of queries, of keys, of a batch ----------------------------------------------------------------------------------


@program
def of_each_query(q, k, v, keep, added):
    return attend(scores(q, k) * of(QUERIES, q) + of(SLOPE, q), v)


@program
def of_each_key(q, k, v, keep, added):
    return attend((scores(q, k) * of(KEYS, q)).masked_fill(~TRIL, MIN), v)


@program
def divided_by_each_key(q, k, v, keep, added):
    return attend(scores(q, k) / of(KEYS, q), v)


@program
def of_queries_and_of_keys(q, k, v, keep, added):
    return attend(scores(q, k) * of(QUERIES, q) / of(KEYS, q), v)


@program
def of_padding(q, k, v, keep, added):
    return attend(scores(q, k) * of(keep, q)[:, None, None], v)


@program
def computed_from_the_queries(q, k, v, keep, added):
    return attend(scores(q, k) * q.square().sum(-1, keepdim=True).sigmoid(), v)


@program
def bounded_scores_against_a_fill(q, k, v, keep, added):
    q, k = (functional.layer_norm(x, x.shape[-1:]) for x in (q, k))
    return attend((scores(q, k) * of(HEADS, q)).masked_fill(~TRIL, -1e4), v)


# -- near misses ------------------------------------------------------------------------------------------------------


@program("a number for each pair")
def of_each_pair(q, k, v, keep, added):
    return attend(scores(q, k) * of(PAIRS, q), v)


@program("a number for each pair")
def divided_by_each_pair(q, k, v, keep, added):
    return attend(scores(q, k) / of(PAIRS, q), v)


@program("by a tensor, or by no finite number")
def numbers_divided_by_scores(q, k, v, keep, added):
    return attend(of(HEADS, q) / (scores(q, k) + 0.0), v)


@program("after they were masked, biased or capped")
def after_a_mask(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, -1e9) * of(HEADS, q), v)


@program("after they were masked, biased or capped")
def after_a_bias(q, k, v, keep, added):
    return attend((scores(q, k) + of(SLOPE, q)) * of(HEADS, q), v)


@program("after they were masked, biased or capped")
def after_a_cap(q, k, v, keep, added):
    return attend(torch.tanh(scores(q, k)) * of(HEADS, q), v)


@program("after they were masked, biased or capped")
def after_the_maximum(q, k, v, keep, added):
    x = scores(q, k)
    return attend((x - x.amax(-1, keepdim=True)) * of(KEYS, q), v)


@program("computed from them")
def divided_by_their_norm(q, k, v, keep, added):
    x = scores(q, k)
    return attend(x / x.norm(dim=-1, keepdim=True), v)


@program("computed from them")
def divided_by_their_largest(q, k, v, keep, added):
    x = scores(q, k)
    return attend(x / x.abs().amax((-2, -1), keepdim=True), v)


@program("nothing says that they stay above it")
def scores_that_reach_a_fill(q, k, v, keep, added):
    q, k = (functional.layer_norm(x, x.shape[-1:]) for x in (q, k))
    return attend((scores(q, k) * (1000 * of(HEADS, q))).masked_fill(~TRIL, -1e4), v)
