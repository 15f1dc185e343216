"""Scores capped by tanh, in the ways in which a model may write it, and what only looks like a cap.

Inputs as in near_misses.py.  `CAPS` has the scale and the softcap of each program that becomes attention.
"""

import math

import torch
from torch.nn import functional

from tests.relax_passes.attention.near_misses import MIN, SLOPE, TRIL, B, H, S
from tests.relax_passes.attention.programs import D, attend, program_list

CAP = 1.5
SCALE = 1 / math.sqrt(D)
PROGRAMS, program = program_list()
CAPS: dict[str, tuple[float, float]] = {}


def capped(scale, softcap):
    """A decorator for a program whose scores have this scale and softcap."""

    def add(function):
        CAPS[function.__name__] = scale, softcap
        return program(function)

    return add


def products(q, k):
    return q @ k.mT


@capped(SCALE, CAP)
def as_gemma_has_it(q, k, v, keep, added):
    x = torch.matmul(q, k.transpose(2, 3)) * SCALE
    x = x / CAP
    x = torch.tanh(x)
    x = x * CAP
    return attend(x + torch.where(TRIL, 0.0, MIN), v)


@capped(SCALE, CAP)
def inverse_of_the_cap(q, k, v, keep, added):
    return attend(torch.tanh(products(q, k) * SCALE * (1 / CAP)) * CAP, v)


@capped(SCALE, CAP)
def cap_first(q, k, v, keep, added):
    return attend(CAP * torch.tanh(SCALE * products(q, k) / CAP), v)


@capped(SCALE, CAP)
def query_scaled(q, k, v, keep, added):
    return attend(torch.tanh(products(q * (SCALE / CAP), k)) * CAP, v)


@capped(SCALE, CAP)
def query_and_key_scaled(q, k, v, keep, added):
    return attend(torch.tanh(products(q / D**0.25, k / D**0.25) / CAP) / (1 / CAP), v)


@capped(SCALE, CAP)
def in_place(q, k, v, keep, added):
    return attend(products(q, k).mul_(SCALE).div_(CAP).tanh_().mul_(CAP), v)


@capped(SCALE, CAP)
def of_tensors(q, k, v, keep, added):
    cap = torch.tensor(CAP)
    return attend(torch.tanh(products(q, k) * SCALE / cap) * cap, v)


@capped(SCALE, CAP)
def of_one_element(q, k, v, keep, added):
    cap = torch.full((1, 1, 1, 1), CAP, dtype=q.dtype)
    return attend(torch.tanh(products(q, k) * SCALE / cap) * cap, v)


@capped(0.4 * 3, 3)
def of_two_numbers(q, k, v, keep, added):
    return attend(3 * torch.tanh(0.4 * products(q, k)), v)


@capped(1, 1)
def without_factors(q, k, v, keep, added):
    return attend(torch.tanh(products(q, k)), v)


@capped(-0.8, 2)
def of_a_negative_factor_after(q, k, v, keep, added):
    return attend(-2 * torch.tanh(0.4 * products(q, k)), v)


@capped(-0.8, 2)
def of_a_negative_factor_before(q, k, v, keep, added):
    return attend(2 * torch.tanh(-(0.4 * products(q, k))), v)


@capped(0.8, 2)
def of_two_negative_factors(q, k, v, keep, added):
    return attend(-(torch.tanh(products(q, k) * -0.4) / 0.5), v)


@capped(0.5 * 4 * 0.4, 0.5 * 4)
def scaled_with_the_bias(q, k, v, keep, added):
    return attend((4 * torch.tanh(0.4 * products(q, k)) + SLOPE.to(q.dtype)) * 0.5, v)


@capped(SCALE, CAP)
def masked_where(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    return attend(torch.where(TRIL, x, -math.inf), v)


@capped(SCALE, CAP)
def masked_by_a_fill(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    return attend(x.masked_fill(~TRIL, MIN), v)


@capped(SCALE, CAP)
def masked_by_a_small_fill(q, k, v, keep, added):
    """The cap proves that scores stay above it."""
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    return attend(x.masked_fill(~TRIL, -1e4), v)


@capped(SCALE, CAP)
def masked_at_run_time(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    return attend(x + added, v)


@capped(SCALE, CAP)
def padded_and_causal(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    x = x.masked_fill(~TRIL, -math.inf).masked_fill(~keep[:, None, None], -math.inf)
    return attend(x, v)


@capped(SCALE, CAP)
def folded_heads(q, k, v, keep, added):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    x = torch.tanh(torch.bmm(q, k.transpose(1, 2)) * SCALE / CAP).reshape(B, H, S, S) * CAP
    weights = torch.softmax(x.masked_fill(~TRIL, -math.inf), -1).reshape(B * H, S, S)
    return torch.bmm(weights, v).reshape(B, H, S, D)


@capped(SCALE, CAP)
def keys_by_queries(q, k, v, keep, added):
    x = CAP * torch.tanh(products(k, q) * SCALE / CAP)
    return torch.softmax(x, -2).mT @ v


@capped(SCALE, CAP)
def softmax_by_sums(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ v


@capped(SCALE, CAP)
def with_a_sink(q, k, v, keep, added):
    x = CAP * torch.tanh(products(q, k) * SCALE / CAP)
    sinks = torch.tensor([0.5, -1.0], dtype=q.dtype).reshape(1, H, 1, 1).expand(B, H, S, 1)
    return torch.softmax(torch.cat([x, sinks], -1), -1)[..., :-1] @ v


@capped(SCALE, CAP)
def scores_in_float32(q, k, v, keep, added):
    x = products(q, k).float() * SCALE
    x = (CAP * torch.tanh(x / CAP)).masked_fill(~TRIL, -math.inf)
    return torch.softmax(x, -1).to(q.dtype) @ v


# -- near misses ------------------------------------------------------------------------------------------------------

TANH = "relax.tanh stands between q·kᵀ and the softmax"


@program(TANH)
def a_bias_before(q, k, v, keep, added):
    return attend(CAP * torch.tanh((products(q, k) * SCALE + SLOPE) / CAP), v)


@program(TANH)
def a_number_before(q, k, v, keep, added):
    return attend(CAP * torch.tanh((products(q, k) * SCALE + 1) / CAP), v)


@program(TANH)
def a_mask_before(q, k, v, keep, added):
    return attend(CAP * torch.tanh(products(q, k).masked_fill(~TRIL, -math.inf) / CAP), v)


@program(TANH)
def a_run_time_mask_before(q, k, v, keep, added):
    return attend(CAP * torch.tanh((products(q, k) + added) / CAP), v)


@program(TANH)
def relative_to_the_maximum_before(q, k, v, keep, added):
    x = products(q, k)
    return attend(CAP * torch.tanh((x - x.amax(-1, keepdim=True)) / CAP), v)


@program(TANH)
def twice(q, k, v, keep, added):
    return attend(CAP * torch.tanh(torch.tanh(products(q, k)) / CAP), v)


@program("by a tensor")
def a_cap_of_each_head(q, k, v, keep, added):
    cap = torch.tensor([1.0, 2.0])[:, None, None]
    return attend(cap * torch.tanh(products(q, k) / cap), v)


@program("capped at 9.99995e-41")
def a_cap_of_nothing(q, k, v, keep, added):
    return attend(torch.tanh(products(q, k)) * 1e-40 + SLOPE, v)


@program("multiplied by -2")
def a_negative_factor_after_the_mask(q, k, v, keep, added):
    return attend(-2 * (torch.tanh(products(q, k)) + torch.where(TRIL, 0.0, 1e9)), v)


@program("relax.sigmoid stands between")
def a_sigmoid(q, k, v, keep, added):
    return attend(CAP * torch.sigmoid(products(q, k) / CAP), v)


@program("a bound of the model's own")
def a_clip(q, k, v, keep, added):
    return attend(functional.hardtanh(products(q, k), -CAP, CAP), v)


@program("computed from them")
def scores_beside_the_cap(q, k, v, keep, added):
    x = products(q, k)
    return attend(torch.tanh(x) + x, v)


@program("another reader")
def weights_capped(q, k, v, keep, added):
    weights = torch.softmax(products(q, k), -1)
    return (weights + torch.tanh(weights)) @ v
