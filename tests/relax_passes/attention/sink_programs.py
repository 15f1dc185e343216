"""Programs with sinks spelled by hand: logits of heads in a softmax's denominator, and what only looks like them.

The inputs are those of attention_near_misses.py; every head, row and key has numbers of its own.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.near_misses import BELOW, MIN, SLOPE, B, H, S
from tests.relax_passes.attention.programs import program_list, scores

PROGRAMS, program = program_list()
TABLE = torch.tensor([0.5, -1.0])


def logits(x):
    """(1, H, 1, 1)."""
    return TABLE.to(x.dtype).reshape(1, H, 1, 1)


def masked(q, k, fill=-math.inf):
    return scores(q, k).masked_fill(~BELOW, fill)


def total(x):
    return x.sum(-1, keepdim=True)


def top(x):
    return x.amax(-1, keepdim=True)


# -- the exponential of a logit, added to the sum ---------------------------------------------------------------------


@program
def beside_the_maximum(q, k, v, keep, added):
    x = masked(q, k)
    e = torch.exp(x - top(x))
    return (e / (total(e) + torch.exp(logits(q) - top(x)))) @ v


@program
def beside_the_maximum_in_one_variable(q, k, v, keep, added):
    x = masked(q, k)
    m = x.max(-1, keepdim=True).values
    e = torch.exp(x - m)
    return (e / (torch.exp(logits(q) - m) + e.sum(dim=3, keepdim=True))) @ v


@program
def beside_a_maximum_with_the_sink(q, k, v, keep, added):
    x = masked(q, k)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def beside_a_maximum_of_both(q, k, v, keep, added):
    x, sink = masked(q, k), logits(q)
    m = torch.cat([x, sink.expand(B, H, S, 1)], -1).amax(-1, keepdim=True)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(sink - m))) @ v


@program
def without_a_maximum(q, k, v, keep, added):
    e = torch.exp(masked(q, k))
    return (e / (total(e) + torch.exp(logits(q)))) @ v


@program
def without_a_maximum_over_finite_fills(q, k, v, keep, added):
    e = torch.exp(masked(q, k, -1e9))
    return (e / (total(e) + torch.exp(logits(q)))) @ v


@program
def exponentials_of_heads_reshaped(q, k, v, keep, added):
    e = torch.exp(masked(q, k))
    return (e / (total(e) + TABLE.to(q.dtype).exp().view(H, 1, 1))) @ v


@program
def without_dimensions_of_one(q, k, v, keep, added):
    x = masked(q, k)
    m = x.amax(-1)
    e = torch.exp(x - m[..., None])
    return (e / (e.sum(-1) + torch.exp(TABLE.to(q.dtype)[:, None] - m)).unsqueeze(-1)) @ v


@program
def without_dimensions_of_one_and_a_maximum_with_the_sink(q, k, v, keep, added):
    x, sink = masked(q, k), TABLE.to(q.dtype)[None, :, None]
    m = torch.maximum(x.amax(-1), sink)
    e = torch.exp(x - m[..., None])
    return (e / (e.sum(-1) + torch.exp(sink - m))[..., None]) @ v


@program
def divided_after_the_product(q, k, v, keep, added):
    x = masked(q, k)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e @ v) / (total(e) + torch.exp(logits(q) - m))


@program
def divided_after_the_product_with_a_row_that_is_nan(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e @ v) / (total(e) + torch.exp(logits(q) - m))


@program
def a_guarded_maximum(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    m = torch.where(m == -math.inf, 0.0, m)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def a_maximum_of_at_least_a_huge_negative_number(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x).clamp(min=-1e30)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def finite_fills(q, k, v, keep, added):
    x = masked(q, k, MIN)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def padding_at_run_time(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def padding_at_run_time_and_rows_that_are_nan(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    e = torch.exp(x - top(x))
    return (e / (total(e) + torch.exp(logits(q) - top(x)))) @ v


@program
def a_pattern_at_run_time(q, k, v, keep, added):
    x = scores(q, k).masked_fill(added == -math.inf, -math.inf)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def biased(q, k, v, keep, added):
    x = scores(q, k) + SLOPE.to(q.dtype)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program
def one_sink_for_all_heads(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(TABLE.to(q.dtype)[1:] - m))) @ v


@program
def a_sink_given_at_run_time(q, k, v, keep, added):
    x, sink = masked(q, k), v.mean((0, 2, 3), keepdim=True)
    m = torch.maximum(top(x), sink)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(sink - m))) @ v


@program
def heads_in_groups(q, k, v, keep, added):
    q, k, v = (x.reshape(B, 1, H, S, -1) for x in (q, k, v))
    x, sink = scores(q, k).masked_fill(~BELOW, -math.inf), TABLE.to(q.dtype).view(1, H, 1, 1)
    m = torch.maximum(top(x), sink)
    e = torch.exp(x - m)
    return ((e / (total(e) + torch.exp(sink - m))) @ v).view(B, H, S, -1)


@program
def an_epsilon_beside_a_sum_of_at_least_one(q, k, v, keep, added):
    x = masked(q, k)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m) + 1e-9)) @ v


@program("relax.exp")
def a_sink_of_rows(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(SLOPE.to(q.dtype)[:, None] - m))) @ v


@program("relax.exp")
def a_sink_along_the_wrong_dimension(q, k, v, keep, added):
    q, k, v = (x[:, :, :H] for x in (q, k, v))
    x = scores(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(TABLE.to(q.dtype)[None, None, :, None] - m))) @ v


@program("relax.exp")
def a_sink_of_the_queries(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(q.mean(-1, keepdim=True) - m))) @ v


@program("relax.exp")
def a_sink_of_batches(q, k, v, keep, added):
    x = masked(q, k)
    e = torch.exp(x)
    return (e / (total(e) + torch.exp(TABLE.to(q.dtype)[:, None, None, None]))) @ v


@program("relax.exp")
def a_sink_that_is_not_relative_to_the_maximum(q, k, v, keep, added):
    x = masked(q, k)
    e = torch.exp(x - top(x))
    return (e / (total(e) + torch.exp(logits(q)))) @ v


@program("relax.exp")
def a_sink_relative_to_a_maximum_without_scores(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / (total(e) + torch.exp(logits(q) - top(scores(q, k))))) @ v


@program("relax.exp")
def a_sink_relative_to_the_maximum_of_other_scores(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x - top(x))
    return (e / (total(e) + torch.exp(logits(q) - top(2 * x)))) @ v


@program("relax.exp")
def everything_relative_to_the_maximum_of_other_scores(q, k, v, keep, added):
    x = scores(q, k)
    m = top(2 * x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program("of other scores")
def everything_relative_to_a_maximum_with_another_sink(q, k, v, keep, added):
    x = scores(q, k)
    m = torch.maximum(top(x), 2 * logits(q))
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m))) @ v


@program("of other scores")
def a_maximum_with_a_sink_that_is_not_in_the_sum(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x - torch.maximum(top(x), logits(q)))
    return (e / total(e)) @ v


@program("relax.exp")
def a_sink_that_is_subtracted(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x - top(x))
    return (e / (total(e) - 0.01 * torch.exp(logits(q) - top(x)))) @ v


@program("relax.exp")
def twice_the_exponential(q, k, v, keep, added):
    x = scores(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + 2 * torch.exp(logits(q) - m))) @ v


@program("relax.exp")
def two_sinks(q, k, v, keep, added):
    x = scores(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(logits(q) - m) + torch.exp(2 * logits(q) - m))) @ v


@program("relax.exp")
def an_exponential_cut_to_an_integer(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x)
    return (e / (total(e) + torch.exp(logits(q)).int())) @ v


@program("relax.exp")
def a_sum_cut_to_an_integer(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / (total(e).int() + torch.exp(logits(q)))) @ v


@program("relax.exp")
def a_sum_of_columns_beside_a_sink(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x)
    return (e / (e.sum(-2, keepdim=True) + torch.exp(logits(q)))) @ v


@program("relax.exp")
def a_sum_of_everything_beside_a_sink(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x)
    return (e / (e.sum((-1, -2), keepdim=True) + torch.exp(logits(q)))) @ v


@program("relax.exp")
def positive_numbers_of_heads_that_are_no_exponentials(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / (total(e) + logits(q).abs())) @ v


@program("kept from 0")
def an_epsilon_without_a_maximum(q, k, v, keep, added):
    e = torch.exp(masked(q, k))
    return (e / (total(e) + 1e-9)) @ v


@program("kept from 0")
def an_epsilon_and_a_sink_without_a_maximum(q, k, v, keep, added):
    e = torch.exp(masked(q, k))
    return (e / (total(e) + torch.exp(logits(q)) + 1e-9)) @ v


@program("kept from 0")
def a_sum_of_at_least_one_beside_a_sink(q, k, v, keep, added):
    x = masked(q, k)
    m = torch.maximum(top(x), logits(q))
    e = torch.exp(x - m)
    return (e / (total(e).clamp(min=1.0) + torch.exp(logits(q) - m))) @ v


@program("may all vanish")
def a_sink_that_vanishes_over_finite_fills(q, k, v, keep, added):
    e = torch.exp(masked(q, k, -1e9))
    return (e / (total(e) + torch.exp(150 * logits(q)[:, 1:]))) @ v


@program("its sink is not finite")
def a_sink_of_infinity(q, k, v, keep, added):
    x = masked(q, k)
    e = torch.exp(x)
    return (e / (total(e) + torch.exp(torch.tensor([-math.inf, 0.5]).to(q.dtype).view(1, H, 1, 1)))) @ v


# -- a logit of 0, or of a number --------------------------------------------------------------------------------------


@program
def softmax_of_one_more(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x).clamp(min=0)
    e = torch.exp(x - m)
    return (e / (torch.exp(-m) + total(e))) @ v


@program
def softmax_of_one_more_by_the_maximum(q, k, v, keep, added):
    x = masked(q, k)
    e = torch.exp(x - top(x))
    return (e / (torch.exp(-top(x)) + total(e))) @ v


@program
def softmax_of_one_more_by_a_difference(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e @ v) / (total(e) + torch.exp(0.0 - m))


@program
def softmax_of_one_more_without_a_maximum(q, k, v, keep, added):
    e = torch.exp(masked(q, k))
    return (e / (1 + total(e))) @ v


@program
def softmax_of_one_more_without_a_maximum_over_finite_fills(q, k, v, keep, added):
    e = torch.exp(masked(q, k, -1e9))
    return (e @ v) / (total(e) + 1.0)


@program
def a_column_of_zeros(q, k, v, keep, added):
    x = torch.cat([masked(q, k), torch.zeros(B, H, S, 1, dtype=q.dtype)], -1)
    return torch.softmax(x, -1)[..., :-1] @ v


@program
def a_column_of_zeros_first(q, k, v, keep, added):
    x = torch.cat([torch.zeros(B, H, S, 1, dtype=q.dtype), masked(q, k)], -1)
    return torch.softmax(x, -1)[..., 1:] @ v


@program
def a_column_like_the_first(q, k, v, keep, added):
    x = masked(q, k)
    x = torch.cat([x, torch.zeros_like(x[..., :1])], -1)
    e = torch.exp(x - top(x))
    return (e / total(e))[..., :-1] @ v


@program
def padded_with_zeros(q, k, v, keep, added):
    return torch.softmax(functional.pad(masked(q, k), (0, 1)), -1)[..., :-1] @ v


@program
def padded_with_a_number_first(q, k, v, keep, added):
    return torch.softmax(functional.pad(masked(q, k), (1, 0), value=0.7), -1)[..., 1:] @ v


@program
def a_column_beside_transposed_scores(q, k, v, keep, added):
    x = functional.pad(scores(k, q).mT.masked_fill(~BELOW, -math.inf), (0, 1))
    return torch.softmax(x, -1)[..., :-1] @ v


@program
def logits_first(q, k, v, keep, added):
    x = torch.cat([logits(q).expand(B, H, S, 1), masked(q, k)], -1)
    return torch.softmax(x, -1)[..., 1:] @ v


@program
def logits_before_a_single_key(q, k, v, keep, added):
    x = torch.cat([logits(q).expand(B, H, S, 1), scores(q, k[:, :, 2:3])], -1)
    return torch.softmax(x, -1)[..., 1:] @ v[:, :, 2:3]


@program
def a_column_of_heads_in_one_dimension(q, k, v, keep, added):
    q, k, v = (x.reshape(B * H, S, -1) for x in (q, k, v))
    x = functional.pad(scores(q, k).masked_fill(~BELOW, -math.inf), (0, 1))
    return (torch.softmax(x, -1)[..., :-1] @ v).view(B, H, S, -1)


@program("relax.exp")
def one_more_relative_to_the_maximum(q, k, v, keep, added):
    x = scores(q, k)
    e = torch.exp(x - top(x))
    return (e / (1 + total(e))) @ v


@program("relax.exp")
def one_more_by_the_maximum_of_the_other_sign(q, k, v, keep, added):
    x = scores(q, k)
    m = top(x)
    e = torch.exp(x - m)
    return (e / (total(e) + torch.exp(m))) @ v


@program("relax.exp")
def half_more(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / (total(e) + 0.5)) @ v


@program("are not dropped")
def a_column_of_zeros_dropped_at_the_other_end(q, k, v, keep, added):
    return torch.softmax(functional.pad(scores(q, k), (1, 0)), -1)[..., :-1] @ v


@program("relax.nn.pad")
def two_columns_of_zeros(q, k, v, keep, added):
    return torch.softmax(functional.pad(scores(q, k), (0, 2)), -1)[..., :-2] @ v


@program("are not dropped")
def a_sink_that_has_a_value(q, k, v, keep, added):
    return torch.softmax(functional.pad(scores(q, k), (0, 1)), -1) @ functional.pad(v, (0, 0, 0, 1), value=1.0)


# -- by the logarithm of the sum -------------------------------------------------------------------------------------


@program
def logarithms_added(q, k, v, keep, added):
    x = masked(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(x, -1, keepdim=True), logits(q))) @ v


@program
def logarithms_added_the_other_way(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    return torch.exp(x - torch.logaddexp(logits(q), x.logsumexp(-1, keepdim=True))) @ v


@program
def logarithms_added_without_their_dimension(q, k, v, keep, added):
    x = masked(q, k)
    log = torch.logaddexp(torch.logsumexp(x, -1), TABLE.to(q.dtype)[None, :, None])
    return torch.exp(x - log.unsqueeze(-1)) @ v


@program
def logarithm_and_zero(q, k, v, keep, added):
    x = masked(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(x, -1, keepdim=True), torch.zeros(1, dtype=q.dtype))) @ v


@program
def logarithm_of_both(q, k, v, keep, added):
    x = masked(q, k)
    both = torch.cat([x, logits(q).expand(B, H, S, 1)], -1)
    return torch.exp(x - torch.logsumexp(both, -1, keepdim=True)) @ v


@program
def logarithm_of_the_sum_and_a_sink(q, k, v, keep, added):
    x = masked(q, k)
    m = torch.maximum(top(x), logits(q))
    return torch.exp(x - (torch.log(total(torch.exp(x - m)) + torch.exp(logits(q) - m)) + m)) @ v


@program
def logarithm_of_the_sum_and_one(q, k, v, keep, added):
    x = masked(q, k)
    return torch.exp(x - torch.log(1 + total(torch.exp(x)))) @ v


@program
def log1p_of_the_sum(q, k, v, keep, added):
    x = masked(q, k)
    return torch.exp(x - torch.log1p(total(torch.exp(x)))) @ v


@program
def log1p_of_the_sum_without_its_dimension(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    return torch.exp(x - torch.exp(x).sum(-1).log1p()[..., None]) @ v


@program
def logarithm_of_the_sum_and_a_sink_with_rows_that_are_nan(q, k, v, keep, added):
    x = masked(q, k)
    m = top(x)
    return torch.exp(x - (m + torch.log(total(torch.exp(x - m)) + torch.exp(logits(q) - m)))) @ v


@program("relax.exp")
def log1p_of_a_sum_relative_to_the_maximum(q, k, v, keep, added):
    x = scores(q, k)
    m = top(x)
    return torch.exp(x - (m + torch.log1p(total(torch.exp(x - m))))) @ v


@program("its sink is not")
def log1p_of_a_sum_of_scores_relative_to_the_maximum(q, k, v, keep, added):
    x = scores(q, k)
    x = x - top(x)
    return torch.exp(x - torch.log1p(total(torch.exp(x)))) @ v


@program("relax.exp")
def log1p_of_a_sum_of_other_scores(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.log1p(total(torch.exp(2 * x)))) @ v


@program("relax.exp")
def log1p_of_a_sum_of_columns(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.log1p(torch.exp(x).sum(-2, keepdim=True))) @ v


@program("relax.exp")
def log1p_of_a_sum_and_a_sink(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.log1p(total(torch.exp(x)) + torch.exp(logits(q)))) @ v


@program("relax.exp")
def log1p_of_a_mean(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.log1p(torch.exp(x).mean(-1, keepdim=True))) @ v


@program("relax.exp")
def a_logarithm_less_one(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.log(total(torch.exp(x)) - 0.5)) @ v


@program("relax.exp")
def logarithms_of_rows_added(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(x, -1, keepdim=True), SLOPE.to(q.dtype)[:, None])) @ v


@program("relax.exp")
def logarithms_of_other_scores_added(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(2 * x, -1, keepdim=True), logits(q))) @ v


@program("relax.exp")
def logarithms_added_to_base_two(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.logaddexp2(torch.logsumexp(x, -1, keepdim=True), logits(q))) @ v


# -- afterwards ------------------------------------------------------------------------------------------------------


@program
def a_gate_behind_the_product(q, k, v, keep, added):
    x = masked(q, k)
    return torch.softmax(x, -1) @ v * torch.sigmoid(torch.logsumexp(x, -1, keepdim=True) - logits(q))


@program
def a_gate_without_its_dimension(q, k, v, keep, added):
    x = masked(q, k)
    gate = torch.sigmoid(torch.logsumexp(x, -1).unsqueeze(-1) - TABLE.to(q.dtype).view(H, 1, 1))
    return gate * (torch.softmax(x, -1) @ v)


@program
def a_gate_of_the_weights(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    return (torch.softmax(x, -1) * torch.sigmoid(torch.logsumexp(x, -1, keepdim=True) - logits(q))) @ v


@program
def a_gate_of_zero(q, k, v, keep, added):
    x = masked(q, k)
    return torch.softmax(x, -1) @ v * torch.logsumexp(x, -1, keepdim=True).sigmoid()


@program("meets something else that its scores give")
def divided_by_a_share(q, k, v, keep, added):
    x = scores(q, k)
    return torch.softmax(x, -1) @ v / (1 + torch.exp(-torch.logsumexp(x, -1, keepdim=True)))


@program("meets something else that its scores give")
def a_gate_of_the_other_sign(q, k, v, keep, added):
    x = scores(q, k)
    return torch.softmax(x, -1) @ v * torch.sigmoid(logits(q) - torch.logsumexp(x, -1, keepdim=True))


@program("meets something else that its scores give")
def a_gate_of_other_scores(q, k, v, keep, added):
    x = scores(q, k)
    return torch.softmax(x, -1) @ v * torch.sigmoid(torch.logsumexp(2 * x, -1, keepdim=True) - logits(q))


@program("meets something else that its scores give")
def a_gate_of_rows(q, k, v, keep, added):
    x = scores(q, k)
    return torch.softmax(x, -1) @ v * torch.sigmoid(torch.logsumexp(x, -1, keepdim=True) - SLOPE.to(q.dtype)[:, None])


@program("meets something else that its scores give")
def a_gate_rounded_to_half_precision(q, k, v, keep, added):
    x = scores(q, k)
    gate = torch.sigmoid(torch.logsumexp(x, -1, keepdim=True) - logits(q)).half()
    return torch.softmax(x, -1) @ v * gate.to(q.dtype)


@program("relax.exp")
def a_logarithm_rounded_to_half_precision(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.logaddexp(torch.logsumexp(x, -1, keepdim=True).half(), logits(q).half()).to(q.dtype)) @ v
