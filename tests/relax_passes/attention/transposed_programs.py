"""Programs whose scores are computed transposed, keys by queries, and what only looks like them.

Inputs as in attention_near_misses.py.  There are as many keys as queries, so that no shape tells them apart.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.near_misses import BELOW, MIN, SLOPE, TRIL, B, H, S
from tests.relax_passes.attention.programs import program_list, scores
from tests.relax_passes.attention.sink_programs import logits

PROGRAMS, program = program_list()


def transposed(q, k):
    return scores(k, q)


@program
def softmax_over_keys(q, k, v, keep, added):
    return torch.softmax(transposed(q, k), -2).transpose(-1, -2) @ v


@program
def values_from_the_left(q, k, v, keep, added):
    return (v.transpose(-1, -2) @ torch.softmax(transposed(q, k), 2)).transpose(-1, -2)


@program
def a_result_that_stays_transposed(q, k, v, keep, added):
    return v.mT @ torch.softmax(transposed(q, k), -2)


@program
def a_result_that_is_read_twice(q, k, v, keep, added):
    out = v.mT @ torch.softmax(transposed(q, k), -2)
    return out.mT + out.sum(-2).unsqueeze(-1)


@program
def a_transposed_mask(q, k, v, keep, added):
    x = transposed(q, k).masked_fill(~BELOW.T, -math.inf)
    return torch.softmax(x, -2).mT @ v


@program
def a_mask_of_finite_fills(q, k, v, keep, added):
    x = torch.where(TRIL.T, transposed(q, k), MIN)
    return torch.softmax(x, -2).mT @ v


@program
def padding(q, k, v, keep, added):
    x = transposed(q, k).masked_fill(~keep[:, None, :, None], -math.inf)
    return torch.softmax(x, -2).mT @ v


@program
def a_bias_of_keys(q, k, v, keep, added):
    x = transposed(q, k) + SLOPE.to(q.dtype)[:, None]
    return torch.softmax(x.masked_fill(~TRIL.T, -math.inf), -2).mT @ v


@program
def a_bias_of_queries_that_cancels(q, k, v, keep, added):
    return torch.softmax(transposed(q, k) + SLOPE.to(q.dtype), -2).mT @ v


@program
def by_the_sum(q, k, v, keep, added):
    x = transposed(q, k).masked_fill(~BELOW.T, -math.inf)
    e = torch.exp(x - x.amax(-2, keepdim=True))
    return (e / e.sum(-2, keepdim=True)).mT @ v


@program
def by_the_sum_without_its_dimension(q, k, v, keep, added):
    x = transposed(q, k)
    e = torch.exp(x - x.max(-2).values.unsqueeze(-2))
    return v.mT @ (e / e.sum(-2).unsqueeze(-2))


@program
def divided_after_the_product(q, k, v, keep, added):
    x = transposed(q, k).masked_fill(~TRIL.T, -math.inf)
    e = torch.exp(x - x.amax(-2, keepdim=True))
    return (e.mT @ v) / e.sum(-2)[..., None]


@program
def by_log_sum_exp(q, k, v, keep, added):
    x = transposed(q, k)
    return torch.exp(x - torch.logsumexp(x, -2, keepdim=True)).mT @ v


@program
def with_a_sink(q, k, v, keep, added):
    x = transposed(q, k).masked_fill(~BELOW.T, -math.inf)
    m = torch.maximum(x.amax(-2, keepdim=True), logits(q))
    e = torch.exp(x - m)
    return (e / (e.sum(-2, keepdim=True) + torch.exp(logits(q) - m))).mT @ v


@program
def a_row_of_sinks(q, k, v, keep, added):
    x = torch.cat([transposed(q, k).masked_fill(~BELOW.T, -math.inf), logits(q).expand(B, H, 1, S)], -2)
    return torch.softmax(x, -2)[:, :, :-1].mT @ v


@program
def a_row_of_sinks_first_and_values_from_the_left(q, k, v, keep, added):
    x = torch.cat([logits(q).expand(B, H, 1, S), transposed(q, k)], -2)
    return v.mT @ torch.softmax(x, -2)[..., 1:, :]


@program
def a_row_of_zeros(q, k, v, keep, added):
    x = functional.pad(transposed(q, k), (0, 0, 0, 1))
    return v.mT @ torch.softmax(x, -2)[..., :-1, :]


@program
def a_column_of_sinks_transposed_for_the_softmax(q, k, v, keep, added):
    x = torch.cat([scores(q, k), logits(q).expand(B, H, S, 1)], -1).mT
    return torch.softmax(x, -2)[..., :-1, :].mT @ v


@program
def by_log_sum_exp_with_a_sink(q, k, v, keep, added):
    x = transposed(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(x, -2, keepdim=True), logits(q))).mT @ v


@program
def by_log1p(q, k, v, keep, added):
    x = transposed(q, k)
    return torch.exp(x - torch.log1p(torch.exp(x).sum(-2, keepdim=True))).mT @ v


@program
def by_a_gate(q, k, v, keep, added):
    x = transposed(q, k)
    return (torch.softmax(x, -2) * torch.sigmoid(torch.logsumexp(x, -2, keepdim=True) - logits(q))).mT @ v


@program
def einsum(q, k, v, keep, added):
    x = torch.einsum("bhkd,bhqd->bhkq", k, q) / 2
    return torch.einsum("bhkq,bhkd->bhqd", torch.softmax(x, 2), v)


@program
def einsum_of_lengths_first(q, k, v, keep, added):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x = torch.einsum("bkhd,bqhd->bhkq", k, q).masked_fill(~TRIL.T, -math.inf)
    return torch.einsum("bhkq,bkhd->bqhd", torch.softmax(x, 2), v)


@program
def einsum_with_transposed_values(q, k, v, keep, added):
    x = torch.einsum("bhkd,bhqd->bhkq", k, q)
    return torch.einsum("bhkd,bhkq->bhdq", v, torch.softmax(x, 2))


@program
def heads_in_one_dimension(q, k, v, keep, added):
    q, k, v = (x.reshape(B * H, S, -1) for x in (q, k, v))
    x = torch.bmm(k, q.transpose(1, 2)).view(B, H, S, S).masked_fill(~TRIL.T, -math.inf)
    return torch.bmm(torch.softmax(x, 2).view(B * H, S, S).transpose(1, 2), v).view(B, H, S, -1)


@program
def keys_of_one_head(q, k, v, keep, added):
    x = transposed(q, k[:, :1]).masked_fill(~TRIL.T, -math.inf)
    return torch.softmax(x, -2).mT @ v[:, :1]


@program
def values_of_one_head_from_the_left(q, k, v, keep, added):
    return (v[:, :1].mT @ torch.softmax(transposed(q, k[:, :1]), -2)).mT


@program
def scores_transposed_back(q, k, v, keep, added):
    x = transposed(q, k).mT.masked_fill(~BELOW, -math.inf)
    return torch.softmax(x, -1) @ v


@program
def scores_transposed_twice(q, k, v, keep, added):
    x = scores(q, k).mT
    return torch.softmax(x + 1.0, -2).mT @ v


@program
def weights_transposed_to_meet_values_from_the_left(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~BELOW, -math.inf)
    return (v.mT @ torch.softmax(x, -1).mT).mT


@program("relax.permute_dims")
def softmax_over_queries(q, k, v, keep, added):
    return torch.softmax(transposed(q, k), -1).mT @ v


@program("over dimension")
def softmax_over_queries_of_scores(q, k, v, keep, added):
    return torch.softmax(scores(q, k), -2) @ v


@program("over dimension")
def values_of_queries(q, k, v, keep, added):
    return torch.softmax(transposed(q, k), -2) @ v


@program("relax.permute_dims")
def a_sum_over_queries(q, k, v, keep, added):
    e = torch.exp(transposed(q, k))
    return (e / e.sum(-1, keepdim=True)).mT @ v


@program("relax.exp")
def the_maximum_of_queries(q, k, v, keep, added):
    x = transposed(q, k)
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return (e / e.sum(-2, keepdim=True)).mT @ v


@program("int32")
def scores_cut_to_integers(q, k, v, keep, added):
    return torch.softmax(transposed(q, k).to(torch.int32).to(q.dtype), -2).mT @ v


@program("over dimension")
def weights_that_are_read_twice(q, k, v, keep, added):
    weights = torch.softmax(transposed(q, k), -2)
    return weights.mT @ v + weights.cumsum(-1)[..., :1]


@program("relax.nn.softmax makes")
def values_from_the_left_and_weights_that_are_read_twice(q, k, v, keep, added):
    weights = torch.softmax(transposed(q, k), -2)
    return v.mT @ weights + weights.cumsum(-1)[..., :1]


@program("relax.exp makes")
def values_from_the_left_and_exponentials_that_are_read_twice(q, k, v, keep, added):
    weights = torch.exp(transposed(q, k))
    return v.mT @ (weights / weights.sum(-2, keepdim=True)) + weights.tanh()


@program("are not dropped")
def a_row_of_sinks_that_has_a_value(q, k, v, keep, added):
    x = functional.pad(transposed(q, k), (0, 0, 0, 1))
    return functional.pad(v, (0, 0, 0, 1), value=1.0).mT @ torch.softmax(x, -2)


@program("are not dropped")
def a_row_of_sinks_dropped_at_the_other_end(q, k, v, keep, added):
    x = functional.pad(transposed(q, k), (0, 0, 0, 1))
    return v.mT @ torch.softmax(x, -2)[..., 1:, :]


@program("over dimension")
def a_column_of_zeros_beside_keys_by_queries(q, k, v, keep, added):
    x = functional.pad(transposed(q, k), (0, 1))
    return torch.softmax(x, -2)[..., :-1] @ v


@program("which is no softmax")
def sigmoids_from_the_left(q, k, v, keep, added):
    return v.mT @ torch.sigmoid(transposed(q, k))


@program("which is no softmax")
def sigmoids_transposed(q, k, v, keep, added):
    return v.mT @ torch.sigmoid(scores(q, k)).mT


@program("relax.divide")
def normed_by_their_sum_from_the_left(q, k, v, keep, added):
    x = transposed(q, k) + 9
    return v.mT @ (x / x.sum(-2, keepdim=True))
