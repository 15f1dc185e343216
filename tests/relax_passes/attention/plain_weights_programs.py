"""Programs whose scores weigh the values without a softmax, and products in a row that are no attention.

Inputs as in attention_near_misses.py.  There are as many tokens as features, so that no shape tells them apart; what
is an attention is refused, and everything stays as the model computes it.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.near_misses import SLOPE, TRIL, B, H, S
from tests.relax_passes.attention.programs import D, attend, scores

GENERATOR = torch.Generator().manual_seed(1)
WEIGHT, OTHER_WEIGHT = (torch.randn(D, D, generator=GENERATOR) for _ in range(2))
WIDE = torch.randn(D, D * D, generator=GENERATOR) / D
KERNEL = torch.randn(D, D, 1, generator=GENERATOR)
DECAY = torch.where(TRIL, 0.9 ** (SLOPE[:, None] - SLOPE).abs(), 0.0)
ATTENTION, NONE = [], []


def attention(function):
    """Decorator: a program that is an attention without a softmax."""
    ATTENTION.append(function)
    return function


def none(function):
    """Decorator: a program without an attention of this kind."""
    NONE.append(function)
    return function


def conv(x, weight):
    """A convolution of length 1 of states (B, H, S, D), giving (B, H, D, S)."""
    return functional.conv1d(x.flatten(0, 1).mT, weight).unflatten(0, (B, H))


# -- attention --------------------------------------------------------------------------------------------------------


@attention
def the_scores_themselves(q, k, v, keep, added):
    return (q @ k.mT) @ v


@attention
def scores_times_a_number(q, k, v, keep, added):
    return (scores(q, k) * 0.5) @ v


@attention
def a_scale_of_queries(q, k, v, keep, added):
    return ((q / math.sqrt(D)) @ k.mT) @ v / S


@attention
def states_of_one_sequence(q, k, v, keep, added):
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    return (q @ k.T) @ v


@attention
def one_tensor_for_all(q, k, v, keep, added):
    return (q @ q.mT) @ q


@attention
def projected_states(q, k, v, keep, added):
    return ((q @ WEIGHT) @ (k @ OTHER_WEIGHT).mT) @ (v @ WEIGHT) @ OTHER_WEIGHT


@attention
def a_feature_map(q, k, v, keep, added):
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    return (q @ k.mT) @ v / (q @ k.sum(-2)[..., None])


@attention
def heads_of_projections(q, k, v, keep, added):
    x = q.transpose(1, 2).flatten(2)
    wide = torch.cat([torch.cat([WEIGHT, OTHER_WEIGHT], 1)] * H)
    y, z = (x @ wide).unflatten(-1, (H, D)).transpose(1, 2), (x @ wide.flip(1)).unflatten(-1, (H, D)).transpose(1, 2)
    return (y @ z.mT / D) @ z


@attention
def einsum(q, k, v, keep, added):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k), v)


@attention
def einsum_of_lengths_first(q, k, v, keep, added):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    return torch.einsum("bhqk,bkhd->bqhd", x, v)


@attention
def einsum_of_shared_keys(q, k, v, keep, added):
    k, v = k[:, 0], v[:, 0]
    return torch.einsum("bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q, k) * 0.5, v)


@attention
def einsum_of_heads_last(q, k, v, keep, added):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.einsum("bqkh,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqkh", q, k), v)


@attention
def bmm(q, k, v, keep, added):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT), v).unflatten(0, (B, H))


@attention
def heads_in_one_dimension_and_apart(q, k, v, keep, added):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    x = (q @ k.mT).view(B, H, S, S) * TRIL
    return (x.view(B * H, S, S) @ v).view(B, H, S, D)


@attention
def causal(q, k, v, keep, added):
    return scores(q, k).tril() @ v


@attention
def causal_by_a_product(q, k, v, keep, added):
    return (scores(q, k) * TRIL) @ v


@attention
def causal_by_a_fill(q, k, v, keep, added):
    return scores(q, k).masked_fill(~TRIL, 0.0) @ v


@attention
def retention(q, k, v, keep, added):
    return (q @ k.mT * DECAY) @ v


@attention
def retention_of_heads_that_share_scores(q, k, v, keep, added):
    decay = torch.stack([DECAY, DECAY**2])
    return ((q[:, :1] @ k[:, :1].mT) * decay) @ v


@attention
def padding_at_run_time(q, k, v, keep, added):
    return (scores(q, k) * keep[:, None, None]) @ v


@attention
def a_bias(q, k, v, keep, added):
    return (scores(q, k) + SLOPE) @ v


@attention
def half_precision(q, k, v, keep, added):
    return (scores(q.half(), k.half()).float() @ v.half().float()).float()


@attention
def normed_scores(q, k, v, keep, added):
    return functional.layer_norm(scores(q, k), (S,)) @ v


@attention
def heads_mixed_by_a_weight(q, k, v, keep, added):
    x = functional.linear(scores(q, k).permute(0, 2, 3, 1), WEIGHT[:H, :H])
    return x.permute(0, 3, 1, 2) @ v


@attention
def a_mean_of_heads(q, k, v, keep, added):
    return scores(q, k).mean(1) @ v[:, 0]


@attention
def scores_computed_transposed(q, k, v, keep, added):
    return (k @ q.mT).mT @ v


@attention
def values_from_the_left(q, k, v, keep, added):
    return v.mT @ (k @ q.mT)


@attention
def scores_transposed_to_meet_values_from_the_left(q, k, v, keep, added):
    return (v.mT @ (q @ k.mT).mT).mT


@attention
def inputs_with_features_first(q, k, v, keep, added):
    return (q.mT @ k) @ v.mT


@attention
def convolved_states(q, k, v, keep, added):
    q, k, v = (conv(x, KERNEL) for x in (q, k, v))
    return ((q.mT @ k) / S) @ v.mT


@attention
def scores_of_a_softmax_as_well(q, k, v, keep, added):
    x = scores(q, k)
    return attend(x, v) @ WEIGHT + x @ v


# -- no attention of this kind --------------------------------------------------------------------------------------


@none
def a_chain_of_weights(q, k, v, keep, added):
    return (q @ WEIGHT) @ OTHER_WEIGHT


@none
def a_low_rank_product(q, k, v, keep, added):
    return (q @ WEIGHT[:, :2]) @ WEIGHT[:, :2].T


@none
def a_product_of_weights(q, k, v, keep, added):
    return (WEIGHT @ OTHER_WEIGHT.T) @ q


@none
def a_mixture_of_tokens(q, k, v, keep, added):
    return (WEIGHT @ q) @ v.mT


@none
def scores_that_meet_a_weight(q, k, v, keep, added):
    return scores(q, k) @ WEIGHT


@none
def rows_of_scores_that_met_a_weight(q, k, v, keep, added):
    return (scores(q, k) @ WEIGHT).mT @ v


@none
def scores_alone(q, k, v, keep, added):
    return scores(q, k)


@none
def a_bilinear_form(q, k, v, keep, added):
    return (q @ WEIGHT) @ k.mT


@none
def keys_by_values_first(q, k, v, keep, added):
    return q @ (k.mT @ v)


@none
def einsum_of_keys_by_values_first(q, k, v, keep, added):
    return torch.einsum("bhqd,bhde->bhqe", q, torch.einsum("bhkd,bhke->bhde", k, v))


@none
def projected_keys_by_values_first(q, k, v, keep, added):
    q, k, v = (functional.relu(x @ WEIGHT) for x in (q, k, v))
    return q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])


@none
def values_by_keys_of_features_first(q, k, v, keep, added):
    q, k, v = (conv(x, KERNEL) for x in (q, k, v))
    return (v @ k.mT) @ q


@none
def a_covariance_of_inputs(q, k, v, keep, added):
    return (q.mT @ q) @ v


@none
def a_covariance_of_projections(q, k, v, keep, added):
    q, v = q @ WEIGHT, v @ WEIGHT
    return (q.mT @ q / S) @ v.mT


@none
def a_covariance_from_the_right(q, k, v, keep, added):
    return v @ (q.mT @ q)


@none
def weights_predicted_from_the_inputs(q, k, v, keep, added):
    first, second = ((k.mean(-2) @ w).unflatten(-1, (D, D)) for w in (WIDE, WIDE.flip(1)))
    return (q @ first) @ second


@none
def rotations_of_rotations(q, k, v, keep, added):
    return (q @ k) @ v


@none
def an_adjacency_of_two_steps(q, k, v, keep, added):
    return q.softmax(-1) @ (q.softmax(-1) @ v)


@none
def attention_that_meets_another_product(q, k, v, keep, added):
    return attend(scores(q, k), v @ WEIGHT) @ k


@none
def scores_summed_up(q, k, v, keep, added):
    return scores(q, k).sum(-1, keepdim=True) * v


@none
def one_hot_rows(q, k, v, keep, added):
    table = functional.one_hot(q.argmax(-1), D).float()
    return (table @ WEIGHT) @ k.mT
