"""Programs that change the weights after the softmax, and what only looks like masking them once more.

Inputs as in near_misses.py.
"""

import math

import torch

from tests.relax_passes.attention.near_misses import BELOW, MIN, TRIL, H, S
from tests.relax_passes.attention.programs import program_list, scores

PROGRAMS, program = program_list()
HEADS = torch.tensor([1.0, 0.0])[:H, None, None]


def weights(q, k, mask=BELOW, fill=-math.inf):
    """Row 0 keeps nothing."""
    return torch.softmax(scores(q, k).masked_fill(~mask, fill), -1)


# -- NaNs -------------------------------------------------------------------------------------------------------------


@program
def nan_to_num(q, k, v, keep, added):
    return weights(q, k).nan_to_num() @ v


@program
def nan_to_num_in_other_precision(q, k, v, keep, added):
    return weights(q, k).nan_to_num(nan=0.0, posinf=1.0).double().to(v.dtype) @ v


@program
def nan_to_num_folded(q, k, v, keep, added):
    return torch.bmm(weights(q, k).nan_to_num().flatten(0, 1), v.flatten(0, 1)).view_as(v)


@program
def where_isnan(q, k, v, keep, added):
    p = weights(q, k)
    return torch.where(p.isnan(), 0.0, p) @ v


@program
def where_not_isnan(q, k, v, keep, added):
    p = weights(q, k, keep[:, None, None])
    return torch.where(~p.isnan(), p, torch.zeros_like(p)) @ v


@program
def where_different_from_itself(q, k, v, keep, added):
    p = weights(q, k, keep[:, None, None])
    return torch.einsum("bhij,bhjd->bhid", p.masked_fill(p != p, 0), v)


@program("replaced by another number than 0")
def nan_to_one(q, k, v, keep, added):
    return weights(q, k).nan_to_num(1.0) @ v


@program("another reader")
def nans_that_are_counted(q, k, v, keep, added):
    p = weights(q, k)
    return torch.where(p.isnan(), 0.0, p) @ v + p.isnan().sum(-1, keepdim=True)


@program("another reader")
def numbers_become_zero(q, k, v, keep, added):
    p = weights(q, k)
    return torch.where(p == 1.0, 0.0, p) @ v


# -- the scores' mask -------------------------------------------------------------------------------------------------


@program
def filled_again(q, k, v, keep, added):
    return weights(q, k).masked_fill(~BELOW, 0.0) @ v


@program
def filled_again_after_the_least(q, k, v, keep, added):
    return weights(q, k, fill=MIN).masked_fill(~BELOW, 0.0) @ v


@program
def filled_again_at_run_time(q, k, v, keep, added):
    mask = keep[:, None, None]
    return torch.where(mask, weights(q, k, mask, MIN), 0.0) @ v


@program
def filled_again_by_another_expression(q, k, v, keep, added):
    p = torch.softmax(scores(q, k).masked_fill(~(TRIL & keep[:, None, None]), -math.inf), -1)
    return p.masked_fill(~keep[:, None, None], 0.0).masked_fill(~TRIL, 0.0) @ v


@program
def multiplied_again(q, k, v, keep, added):
    return (weights(q, k) * BELOW) @ v


@program
def multiplied_again_after_the_least(q, k, v, keep, added):
    return (weights(q, k, fill=MIN) * BELOW.float()) @ v


@program
def multiplied_again_at_run_time(q, k, v, keep, added):
    mask = keep[:, None, None].float()
    return (weights(q, k, mask != 0, -1e30) * mask) @ v


@program
def filled_again_beside_a_bias(q, k, v, keep, added):
    x = (scores(q, k) + torch.arange(S)).masked_fill(~BELOW, MIN)
    return torch.softmax(x, -1).masked_fill(~BELOW, 0.0) @ v


@program
def filled_again_above_a_floor(q, k, v, keep, added):
    x = scores(q, k).masked_fill(~BELOW, -math.inf).clamp(min=MIN)
    return torch.softmax(x, -1).masked_fill(~BELOW, 0.0) @ v


@program("not what the scores' own mask keeps")
def filled_by_a_narrower_mask(q, k, v, keep, added):
    return weights(q, k, TRIL).masked_fill(~BELOW, 0.0) @ v


@program("not what the scores' own mask keeps")
def filled_by_a_wider_mask(q, k, v, keep, added):
    return weights(q, k, BELOW).masked_fill(~TRIL, 0.0) @ v


@program("not what the scores' own mask keeps")
def filled_where_the_mask_keeps(q, k, v, keep, added):
    return weights(q, k, TRIL).masked_fill(TRIL, 0.0) @ v


@program("not what the scores' own mask keeps")
def filled_at_run_time_by_another_mask(q, k, v, keep, added):
    mask = keep[:, None, None]
    return weights(q, k, mask | TRIL).masked_fill(~mask, 0.0) @ v


@program("nothing says that they stay above it")
def filled_again_after_a_small_fill(q, k, v, keep, added):
    return weights(1e6 * q, k, TRIL, -1e4).masked_fill(~TRIL, 0.0) @ v


@program("may be infinite")
def filled_again_beside_infinite_summands(q, k, v, keep, added):
    x = (scores(q, k) + added).masked_fill(~TRIL, -math.inf)
    return torch.softmax(x, -1).masked_fill(~TRIL, 0.0) @ v


@program("stands between the softmax and the values")
def heads_left_out(q, k, v, keep, added):
    return (weights(q, k, TRIL) * HEADS) @ v


@program("stands between the softmax and the values")
def filled_with_ones(q, k, v, keep, added):
    return weights(q, k, TRIL).masked_fill(~TRIL, 1.0) @ v


@program("stands between the softmax and the values")
def filled_again_and_normalised(q, k, v, keep, added):
    p = weights(q, k, TRIL).masked_fill(~TRIL, 0.0)
    return (p / (p.sum(-1, keepdim=True) + 1e-9)) @ v
