"""Multi-query and grouped attention whose heads are folded into rows, as einsum and bmm fold them.

Inputs as in near_misses.py, with four heads of queries: k and v are used without their heads, or as two groups.
"""

import math

import torch

from tests.relax_passes.attention import near_misses
from tests.relax_passes.attention.near_misses import MIN, TRIL, B, S
from tests.relax_passes.attention.programs import D, program_list

PROGRAMS, program = program_list()
H, G = 4, 2
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]


def inputs():
    q = torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(1))
    return q, *near_misses.inputs()[1:]


# -- one head of keys and values --------------------------------------------------------------------------------------


@program
def palm(q, k, v, keep, added):
    x = torch.einsum("b h i d, b j d -> b h i j", q * D**-0.5, k[:, 0])
    x = x.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), MIN)
    x = x - x.amax(dim=-1, keepdim=True).detach()
    return torch.einsum("b h i j, b j d -> b h i d", torch.softmax(x, -1), v[:, 0])


@program
def palm_with_alibi_and_padding(q, k, v, keep, added):
    x = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) + SLOPES * torch.arange(S)
    x = x.masked_fill(~keep[:, None, None], -math.inf)
    return torch.einsum("bhij,bjd->bhid", torch.softmax(x, -1), v[:, 0])


@program
def length_first(q, k, v, keep, added):
    x = torch.einsum("bihd,bjd->bhij", q.transpose(1, 2), k[:, 0])
    return torch.einsum("bhij,bjd->bihd", torch.softmax(x, -1), v[:, 0]).transpose(1, 2)


@program
def keys_first(q, k, v, keep, added):
    x = torch.einsum("bjd,bhid->bhij", k[:, 0], q)
    return torch.einsum("bjd,bhij->bhid", v[:, 0], torch.softmax(x, -1))


@program
def by_bmm(q, k, v, keep, added):
    x = torch.bmm(q.reshape(B, H * S, D), k[:, 0].mT).view(B, H, S, S) * 0.3
    p = torch.softmax(x + SLOPES * torch.arange(S), -1)
    return torch.bmm(p.view(B, H * S, S), v[:, 0]).view(B, H, S, D)


@program
def by_matmul_of_queries_and_heads(q, k, v, keep, added):
    """Rows are queries with their heads, as in GPTBigCode."""
    x = torch.matmul(q.transpose(1, 2).reshape(B, S * H, D), k[:, 0].mT).view(B, S, H, S)
    p = torch.softmax(x.transpose(1, 2).masked_fill(~TRIL, -math.inf), -1)
    return torch.matmul(p.transpose(1, 2).reshape(B, S * H, S), v[:, 0]).view(B, S, H, D).transpose(1, 2)


@program
def heads_folded_into_the_batch_afterwards(q, k, v, keep, added):
    x = torch.bmm(q.reshape(B, H * S, D), k[:, 0].mT).view(B * H, S, S)
    return torch.einsum("bhij,bjd->bhid", torch.softmax(x, -1).view(B, H, S, S), v[:, 0])


@program
def without_a_batch(q, k, v, keep, added):
    x = torch.einsum("hid,jd->hij", q[0], k[0, 0]) + SLOPES * torch.arange(S)
    return torch.einsum("hij,jd->hid", torch.softmax(x, -1), v[0, 0])


@program
def values_by_matmul(q, k, v, keep, added):
    x = torch.einsum("bhid,bjd->bhij", q, k[:, 0])
    return torch.softmax(x, -1) @ v[:, :1]


# -- groups -----------------------------------------------------------------------------------------------------------


@program
def groups(q, k, v, keep, added):
    x = torch.einsum("bgrid,bgjd->bgrij", q.view(B, G, H // G, S, D), k)
    p = torch.softmax(x.masked_fill(~keep[:, None, None, None], -math.inf), -1)
    return torch.einsum("bgrij,bgjd->bgrid", p, v).reshape(B, H, S, D)


@program
def groups_length_first(q, k, v, keep, added):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x = torch.einsum("bigrd,bjgd->bgrij", q.unflatten(2, (G, H // G)), k)
    p = torch.softmax(x.masked_fill(~TRIL, MIN), -1)
    return torch.einsum("bgrij,bjgd->bigrd", p, v).flatten(2, 3).transpose(1, 2)


@program
def groups_inside(q, k, v, keep, added):
    x = torch.einsum("brgid,bgjd->brgij", q.view(B, H // G, G, S, D), k)
    return torch.einsum("brgij,bgjd->brgid", torch.softmax(x, -1), v).reshape(B, H, S, D)


@program
def groups_of_rows_by_matmul(q, k, v, keep, added):
    x = (q.view(B, G, H // G * S, D) @ k.mT).view(B, H, S, S)
    p = torch.softmax(x + SLOPES * torch.arange(S), -1)
    return (p.view(B, G, H // G * S, S) @ v).view(B, H, S, D)


@program
def groups_first(q, k, v, keep, added):
    q, k, v = q.view(B, G, H // G, S, D).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    x = torch.einsum("gbrid,gbjd->bgrij", q, k)
    return torch.einsum("bgrij,gbjd->bgrid", torch.softmax(x, -1), v).reshape(B, H, S, D)


# -- near misses ------------------------------------------------------------------------------------------------------


@program("stands between the softmax and the values")
def weights_folded_across_their_keys(q, k, v, keep, added):
    """Rows of weights are cut apart."""
    x = torch.einsum("bhid,bjd->bhij", q, k[:, 0])
    p = torch.softmax(x, -1).reshape(B, H * S * 2, S // 2)
    return (p @ v[:, 0, : S // 2]).view(B, H, S, 2 * D)


@program("scores are reshaped")
def scores_folded_across_their_keys(q, k, v, keep, added):
    x = torch.einsum("bhid,bjd->bhij", q, k[:, 0]).reshape(B, H, S * 2, S // 2)
    return (torch.softmax(x, -1) @ v[:, :1, : S // 2]).reshape(B, H, S, 2 * D)


@program("stands between")
def keys_and_heads_exchanged(q, k, v, keep, added):
    x = torch.einsum("bhid,bjd->bhij", q, k[:, 0])
    p = torch.softmax(x, -1).permute(0, 3, 2, 1)  # (b, j, i, h)
    return torch.einsum("bjih,bhd->bjid", p, v[:, 0, :H])
