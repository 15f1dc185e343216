"""Programs that are, or only look like, attention: what a matcher must prove before it takes them for the composite.

q, k, v (B, H, S, D), keep (B, S) bool: true where a key counts, nothing in the last batch entry; added (B, 1, S, S): a
mask to add, -inf in some places and all over row 1.  `reason` is in the refusal; where there is none, the program
becomes the composite.  Either way the numbers are PyTorch's, NaNs in the same places.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.programs import D, attend, program_list, scores

B, H, S = 2, 2, 8
MIN = torch.finfo(torch.float32).min
TRIL = torch.ones(S, S, dtype=torch.bool).tril()
BELOW = torch.ones(S, S, dtype=torch.bool).tril(-1)  # row 0 is empty
FIRST_ROWS = (torch.arange(S) < 3)[:, None].expand(S, S)
SLOPE = torch.arange(S) * 0.5
SINKS = torch.tensor([0.5, -1.0])


def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, generator=generator) for _ in range(3))
    keep = torch.ones(B, S, dtype=torch.bool)
    keep[0, 5:] = False
    keep[1] = False
    added = torch.zeros(B, 1, S, S).masked_fill(torch.rand(B, 1, S, S, generator=generator) < 0.3, -math.inf)
    added[:, :, 1] = -math.inf
    return q, k, v, keep, added


PROGRAMS, program = program_list()


# -- summands ---------------------------------------------------------------------------------------------------------


@program
def scores_of_0_and_a_summand(q, k, v, keep, added):
    return attend(scores(q, 1e6 * k) * 0.0 + SLOPE, v)


@program("computed from them")
def scores_taken_off_themselves(q, k, v, keep, added):
    x = scores(q, 1e6 * k)
    return attend(x - x.relu() + SLOPE, v)


@program("computed from them")
def scores_rounded_in_part(q, k, v, keep, added):
    x = scores(q, 1e6 * k)
    return attend(SLOPE - (x - 0.5 * x) + 0.5 * x, v)


# -- dtypes ---------------------------------------------------------------------------------------------------------


@program("the scores are int32")
def scores_cast_to_integers(q, k, v, keep, added):
    return attend(scores(q, k).to(torch.int32).float(), v)


@program("bool")
def scores_cast_to_bool(q, k, v, keep, added):
    return attend((scores(q, k) * 0).to(torch.bool).float(), v)


@program("rounded to int32")
def weights_cast_to_integers(q, k, v, keep, added):
    return torch.softmax(50 * scores(q, k), -1).to(torch.int32).float() @ v


@program("rounded to bool")
def weights_cast_to_bool(q, k, v, keep, added):
    return torch.softmax(scores(q, k), -1).to(torch.bool).float() @ v


@program("rounded from float32 to float16")
def scores_rounded(q, k, v, keep, added):
    return attend((40 * scores(q, k)).half().float(), v)


@program("rounded to float16")
def weights_rounded(q, k, v, keep, added):
    return torch.softmax(scores(q, k), -1).half().float() @ v


@program
def integer_bias(q, k, v, keep, added):
    return attend(scores(q, k) + torch.arange(S), v)


@program
def bool_bias(q, k, v, keep, added):
    return attend(scores(q, k) + TRIL, v)


@program
def integer_scale(q, k, v, keep, added):
    return attend(scores(q, k) * torch.tensor(2), v)


@program
def bool_scale(q, k, v, keep, added):
    return attend(scores(q, k) * torch.tensor(True), v)


@program
def scale_cut_to_an_integer(q, k, v, keep, added):
    return attend((q * torch.tensor(2.7).to(torch.int32)) @ k.transpose(-1, -2), v)


@program
def fill_that_overflows_in_half_precision(q, k, v, keep, added):
    x = scores(q.half(), k.half()).float().masked_fill(~BELOW, -1e9).half()
    return (torch.softmax(x, -1) @ v.half()).float()


@program
def bias_that_overflows_in_half_precision(q, k, v, keep, added):
    x = (scores(q.half(), k.half()).float() + torch.where(BELOW, 0.0, -1e9)).half()
    return (torch.softmax(x, -1) @ v.half()).float()


@program
def bias_rounded_to_half_precision(q, k, v, keep, added):
    return attend(scores(q, k) + torch.where(BELOW, 0.0, -1e9).half(), v)


# -- factors --------------------------------------------------------------------------------------------------------


@program
def scale_of_zero(q, k, v, keep, added):
    return attend((scores(q, k) * 0.0).masked_fill(~TRIL, -math.inf), v)


@program
def negative_scale(q, k, v, keep, added):
    return attend((scores(q, k) * -1.5).masked_fill(~TRIL, -math.inf), v)


@program
def negated_scores(q, k, v, keep, added):
    return attend((-scores(q, k)).masked_fill(~TRIL, -math.inf), v)


@program
def sdpa_scale_of_zero(q, k, v, keep, added):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=BELOW, scale=0.0)


@program
def sdpa_negative_scale(q, k, v, keep, added):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(TRIL, 0.5, -math.inf), scale=-0.7)


@program("multiplied by 0")
def masked_scores_times_zero(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, -1e9) * 0.0, v)


@program("multiplied by -1")
def masked_scores_negated(q, k, v, keep, added):
    return attend(-(scores(q, k).masked_fill(~TRIL, MIN)), v)


# -- fills ----------------------------------------------------------------------------------------------------------


@program("nothing says that they stay above it")
def huge_scores_against_a_small_fill(q, k, v, keep, added):
    return attend((1e6 * scores(q, k)).masked_fill(~TRIL, -1e4), v)


@program
def huge_scores_against_a_small_summand(q, k, v, keep, added):
    return attend(1e5 * scores(q, k) + torch.where(TRIL, 0.0, -1e4), v)


@program
def bounded_scores_against_a_small_fill(q, k, v, keep, added):
    q, k = (functional.layer_norm(x, (D,)) for x in (q, k))
    return attend(scores(q, k).masked_fill(~BELOW, -1e4), v)


@program("nothing says that they stay above it")
def bounded_scores_that_reach_a_small_fill(q, k, v, keep, added):
    q, k = (functional.layer_norm(x, (D,)) for x in (q, k))
    return attend((5000 * scores(q, k)).masked_fill(~TRIL, -1e4), v)


@program("which masks nothing")
def filled_with_zero(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, 0.0), v)


@program("nothing says that they stay above it")
def filled_and_scaled_back(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) * 1e-38, v)


@program("were filled with -1e+09")
def filled_and_shifted_back(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, -1e9) + 1e9, v)


@program("are shifted by up to")
def filled_with_the_least_and_shifted_back(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) + torch.where(TRIL, 0.0, -MIN), v)


@program("are shifted by up to")
def filled_with_the_least_and_shifted_back_at_run_time(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) + torch.where(keep[:, None, None], 0.0, -MIN), v)


@program("are shifted by up to")
def filled_with_the_least_and_less_a_mask(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) - (1 - keep.float())[:, None, None] * MIN, v)


@program
def filled_with_the_least_before_a_mask_is_added(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) + torch.where(TRIL.T | TRIL, 0.0, MIN), v)


@program
def filled_with_the_least_before_padding_is_added(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) + (1 - keep.float())[:, None, None] * MIN, v)


@program
def filled_with_the_least_before_padding_is_subtracted(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, MIN) - torch.where(keep[:, None, None], 0.0, -MIN / 2), v)


@program
def filled_with_the_least_and_biased(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, MIN) + SLOPE, v)


@program
def filled_with_infinity_and_biased(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -math.inf) + SLOPE, v)


@program
def filled_and_scaled(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -1e9) * 2.0, v)


@program
def fills_of_different_values(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -1e9).masked_fill(FIRST_ROWS & ~TRIL, -1e12), v)


@program
def fills_of_different_values_overwritten(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -1e12).masked_fill(FIRST_ROWS & ~TRIL, -1e9), v)


@program
def fills_of_disjoint_rows(q, k, v, keep, added):
    x = torch.where(FIRST_ROWS, -1e9, scores(q, k))
    return attend(torch.where(FIRST_ROWS.flip(0), MIN, x), v)


@program
def infinity_filled_again(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -math.inf).masked_fill(FIRST_ROWS & ~TRIL, -1e9), v)


@program("does not mask below what is added")
def filled_beside_a_huge_bias(q, k, v, keep, added):
    x = scores(q, k) + torch.where(FIRST_ROWS & TRIL, -1e9, 0.0)
    return attend(x.masked_fill(~TRIL, -1e9), v)


@program
def filled_twice_with_the_least(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, MIN).masked_fill(FIRST_ROWS, MIN), v)


@program
def summands_that_overflow(q, k, v, keep, added):
    return attend(scores(q, k) + torch.where(BELOW, 0.0, MIN) + torch.where(FIRST_ROWS, MIN, 0.0), v)


@program
def infinities_at_run_time_filled_again(q, k, v, keep, added):
    return attend((scores(q, k) + added).masked_fill(added < 0, -1e30), v)


@program
def fills_at_run_time_of_different_values(q, k, v, keep, added):
    x = scores(q, k).masked_fill(added < 0, -1e12).masked_fill(added < 0, MIN)
    return attend(x.masked_fill(~keep[:, None, None], -1e9).clamp(min=MIN), v)


@program("a bound of the model's own")
def clamped_above_zero(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~TRIL, -1e9).clamp(min=-1.0), v)


@program
def infinity_clamped_to_the_least(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -math.inf).clamp(min=MIN), v)


@program("a bound of the model's own")
def clamped_on_both_sides(q, k, v, keep, added):
    return attend((5 * scores(q, k)).clamp(-5.0, 5.0), v)


@program("a bound of the model's own")
def clamped_below_a_number(q, k, v, keep, added):
    return attend(torch.minimum(5 * scores(q, k), torch.tensor(0.5)).masked_fill(~TRIL, -math.inf), v)


@program("minimum of the scores with a tensor")
def clamped_below_a_number_for_each_key(q, k, v, keep, added):
    return attend(torch.minimum(5 * scores(q, k), SLOPE), v)


@program
def clamped_to_finite_numbers(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -math.inf).clamp(MIN, -MIN), v)


@program
def clamped_to_finite_numbers_before_the_mask(q, k, v, keep, added):
    x = torch.minimum(torch.tensor(-MIN), scores(q, k).clamp(min=MIN))
    return attend(x.masked_fill(~keep[:, None, None], -math.inf), v)


@program
def clamped_to_finite_numbers_in_half_precision(q, k, v, keep, added):
    most = torch.finfo(torch.float16).max
    x = scores(q.half(), k.half()).clamp(-most, most)
    return (torch.softmax(x, -1) @ v.half()).float()


@program("masked again")
def filled_after_the_maximum(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~BELOW, -1e9)
    x = x - x.amax(-1, keepdim=True)
    return attend(x.masked_fill(FIRST_ROWS, -1e9), v)


# -- empty rows -----------------------------------------------------------------------------------------------------


@program
def empty_row(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~BELOW, -math.inf), v)


@program
def empty_row_of_a_summand(q, k, v, keep, added):
    return attend(scores(q, k) + torch.where(BELOW, 0.0, -math.inf), v)


@program
def empty_row_of_sdpa(q, k, v, keep, added):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=BELOW)


@program
def empty_batch_entry_at_run_time(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~keep[:, None, None], -math.inf), v)


@program
def empty_batch_entry_at_run_time_of_sdpa(q, k, v, keep, added):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])


@program
def empty_batch_entry_that_averages(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~keep[:, None, None], -1e9), v)


@program
def empty_rows_constant_and_at_run_time(q, k, v, keep, added):
    return attend(scores(q, k).masked_fill(~(BELOW & keep[:, None, None]), -math.inf), v)


@program
def empty_rows_of_a_mask_at_run_time(q, k, v, keep, added):
    return attend(scores(q, k) + added, v)


@program
def empty_rows_of_a_mask_at_run_time_of_sdpa(q, k, v, keep, added):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=added)


# -- softmax by its parts -------------------------------------------------------------------------------------------


def exponentials(q, k):
    x = scores(q, k).masked_fill(~BELOW, -math.inf)
    return torch.exp(x - x.amax(-1, keepdim=True))


@program
def exp_and_sum(q, k, v, keep, added):
    e = exponentials(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


@program
def exp_and_sum_after_the_product(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~TRIL, -1e9)
    e = torch.exp(x - x.detach().max(-1, keepdim=True).values)
    return (e @ v) / (e.sum(-1, keepdim=True) + 1e-9)


@program
def exp_and_sum_without_a_maximum(q, k, v, keep, added):
    e = torch.exp(scores(q, k).masked_fill(~BELOW, -math.inf))
    return (e @ v) / e.sum(-1, keepdim=True)


@program
def exp_and_sum_of_a_finite_maximum(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~BELOW, -math.inf)
    top = x.amax(-1, keepdim=True)
    e = torch.exp(x - top.masked_fill(top == -math.inf, 0.0))
    total = e.sum(-1, keepdim=True)
    return (e / torch.where(total == 0, 1.0, total)) @ v


@program("may all vanish")
def finite_fill_without_a_maximum(q, k, v, keep, added):
    e = torch.exp(scores(q, k).masked_fill(~BELOW, -1e9))
    return (e / e.sum(-1, keepdim=True)) @ v


@program("relax.exp")
def exp_divided_by_more_than_its_sum(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


@program("relax.exp")
def exp_divided_by_the_sum_of_columns(q, k, v, keep, added):
    e = torch.exp(scores(q, k))
    return (e / e.sum(-2, keepdim=True)) @ v


@program
def exp_of_log_softmax(q, k, v, keep, added):
    return torch.exp(functional.log_softmax(scores(q, k).masked_fill(~BELOW, -math.inf), -1)) @ v


@program
def exp_of_less_than_log_sum_exp(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~TRIL, -math.inf)
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True)) @ v


@program
def exp_of_less_than_log_sum_exp_without_its_dimension(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~TRIL, -math.inf)
    return torch.exp(x - torch.logsumexp(x, -1).unsqueeze(-1)) @ v


@program("relax.exp")
def exp_of_less_than_another_log_sum_exp(q, k, v, keep, added):
    x = scores(q, k)
    return torch.exp(x - torch.logsumexp(2 * x, -1, keepdim=True)) @ v


def by_log_sum(x, v):
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True)) @ v


@program
def log_sum_beside_fills_of_infinity(q, k, v, keep, added):
    return by_log_sum(scores(q, k).masked_fill(~keep[:, None, None], -math.inf), v)


@program("log-sum-exp")
def log_sum_of_rows_of_fills(q, k, v, keep, added):
    return by_log_sum(scores(q, k).masked_fill(~keep[:, None, None], MIN), v)


@program("log-sum-exp")
def log_sum_of_rows_of_summands(q, k, v, keep, added):
    return by_log_sum(scores(q, k) + (1 - keep.float())[:, None, None] * MIN, v)


@program("log-sum-exp")
def log_sum_of_a_huge_summand(q, k, v, keep, added):
    return by_log_sum(scores(q, k) + TRIL * 1e9, v)


@program
def log_sum_beside_constant_summands(q, k, v, keep, added):
    return by_log_sum(scores(q, k) + torch.zeros(S, S).masked_fill(~TRIL, -1e9), v)


@program("log-sum-exp")
def log_sum_of_a_row_of_constant_summands(q, k, v, keep, added):
    return by_log_sum(scores(q, k) + torch.zeros(S, S).masked_fill(~BELOW, MIN), v)


@program
def log_sum_beside_summands_of_infinity(q, k, v, keep, added):
    return by_log_sum(scores(q, k) + torch.zeros(S, S).masked_fill(~TRIL, -math.inf), v)


@program
def log_sum_beside_constant_fills(q, k, v, keep, added):
    return by_log_sum((scores(q, k) + SLOPE).masked_fill(~TRIL, MIN), v)


@program("log-sum-exp")
def log_sum_of_a_row_of_constant_fills(q, k, v, keep, added):
    return by_log_sum(scores(q, k).masked_fill(~BELOW, MIN), v)


@program("log-sum-exp")
def log_sum_of_fills_by_two_masks(q, k, v, keep, added):
    return by_log_sum(scores(q, k).masked_fill(~TRIL, MIN).masked_fill(~keep[:, None, None], -math.inf), v)


@program("log-sum-exp")
def log_sum_of_floored_scores(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~keep[:, None, None], -math.inf)
    return by_log_sum(x.clamp(min=MIN), v)


@program
def less_the_maximum(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~BELOW, MIN)
    return attend(x - x.max(-1, keepdim=True).values, v)


# -- sinks ----------------------------------------------------------------------------------------------------------


def with_sinks(x, sinks):
    return torch.cat([x, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], -1)


@program
def sinks(q, k, v, keep, added):
    x = with_sinks(scores(q, k).masked_fill(~BELOW, -math.inf), SINKS)
    return torch.softmax(x, -1)[..., :-1] @ v


@program
def sinks_less_the_maximum(q, k, v, keep, added):
    x = with_sinks(scores(q, k).masked_fill(~keep[:, None, None], MIN), SINKS)
    x = x - x.max(-1, keepdim=True).values
    return torch.softmax(x, -1, dtype=torch.float32)[..., :-1] @ v


@program("and its sink is not")
def sinks_beside_scores_less_the_maximum(q, k, v, keep, added):
    x = scores(q, k)
    x = with_sinks(x - x.amax(-1, keepdim=True), SINKS)
    return torch.softmax(x, -1)[..., :-1] @ v


@program("are not dropped")
def sinks_dropped_at_the_other_end(q, k, v, keep, added):
    return torch.softmax(with_sinks(scores(q, k), SINKS), -1)[..., 1:] @ v


@program("it is not one number a head")
def sinks_of_rows(q, k, v, keep, added):
    x = torch.cat([scores(q, k), torch.arange(S * 1.0)[None, None, :, None].expand(B, H, S, 1)], -1)
    return torch.softmax(x, -1)[..., :-1] @ v


# -- what is no product ------------------------------------------------------------------------------------------


@program("otherwise than by a product")
def distances(q, k, v, keep, added):
    return attend(-torch.cdist(q, k), v)


@program("otherwise than by a product")
def sums_behind_a_tanh(q, k, v, keep, added):
    return attend(torch.tanh(q[:, :, :, None] + k[:, :, None]) @ torch.ones(D), v)


# -- what is no softmax -----------------------------------------------------------------------------------------------


@program("relax.divide")
def normed_by_their_sum(q, k, v, keep, added):
    x = scores(q, k) + 9
    return x / x.sum(-1, keepdim=True) @ v


@program("relax.sigmoid")
def sigmoid(q, k, v, keep, added):
    return torch.sigmoid(scores(q, k)) @ v


@program("which is no softmax")
def squared_relu(q, k, v, keep, added):
    return torch.relu(scores(q, k)).square() @ v


@program("stands between the softmax and the values")
def masked_after_softmax(q, k, v, keep, added):
    return (torch.softmax(scores(q, k), -1) * TRIL) @ v


@program("stands between the softmax and the values")
def masked_and_normalised_after_softmax(q, k, v, keep, added):
    weights = torch.softmax(scores(q, k), -1) * TRIL
    return (weights / weights.sum(-1, keepdim=True)) @ v


@program
def keys_left_out_times_infinity(q, k, v, keep, added):
    return attend(scores(q, k) + (1 - keep.float())[:, None, None] * -math.inf, v)  # 0 * -inf is NaN


@program
def keys_left_out_times_the_least_number(q, k, v, keep, added):
    return attend(scores(q, k) + (1 - keep.float())[:, None, None] * MIN, v)


@program
def softcap(q, k, v, keep, added):
    return attend(torch.tanh(scores(q, k) / 20) * 20, v)
