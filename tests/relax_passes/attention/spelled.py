"""Ways in which models spell attention by hand, each a module of q, k, v and run-time masks, with the form it becomes.

q (B, H, S, D), k and v (B, H or 2, S, D), keep (B, S) int64: 1 where a key counts, rows (B, 1, S, S) bool: a pattern
that is known at run time only.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from tests.relax_passes.attention.programs import D, attend, scores

B, H, KV_HEADS, S = 2, 4, 2, 12
MIN = torch.finfo(torch.float32).min
TRIL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = (torch.arange(S)[:, None] - torch.arange(S)[None]).abs() <= 2
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, 32 * H).reshape(32, H)


def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, S, D, generator=generator) for heads in (H, KV_HEADS, KV_HEADS))
    keep = torch.ones(B, S, dtype=torch.int64)
    keep[1, S - 4 :] = 0
    rows = (torch.rand(B, 1, S, S, generator=generator) < 0.5) | torch.eye(S, dtype=torch.bool)
    return q, k, v, keep, rows


@dataclass(frozen=True)
class Spelling:
    """What a spelling becomes.  mask: the constant mask as (…, S, S) bool; bias: the shape of the bias, if any."""

    function: object
    mask: torch.Tensor | None = None
    bias: tuple[int, ...] | None = None
    kv_heads: int = H
    name: str = "softmax(matmul)"


def repeat_kv(x):
    return x[:, :, None].expand(B, KV_HEADS, H // KV_HEADS, S, D).reshape(B, H, S, D)


def distances(device=None):
    i = torch.arange(S)
    return i[:, None] - i[None]


def plain(q, k, v, keep, rows):
    return attend(scores(q, k), v)


def add_float_mask(q, k, v, keep, rows):
    return attend(scores(q, k) + torch.where(TRIL, 0.0, -math.inf), v)


def add_finfo_min(q, k, v, keep, rows):
    return attend(torch.zeros(S, S).masked_fill(~TRIL, MIN) + scores(q, k), v)


def subtract_penalty(q, k, v, keep, rows):
    return attend(scores(q, k) - 1e9 * (~TRIL).float(), v)


def masked_fill_inf(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(~WINDOW, -math.inf), v)


def masked_fill_1e9(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(TRIL.int() == 0, -1e9), v)


def where_finfo_min(q, k, v, keep, rows):
    return attend(torch.where(TRIL, scores(q, k), torch.full((), MIN)), v)


def where_reversed(q, k, v, keep, rows):
    return attend(torch.where(~WINDOW, torch.tensor(MIN / 2), scores(q, k)), v)


def two_masks(q, k, v, keep, rows):
    x = scores(q, k).masked_fill(~TRIL, -math.inf)
    return attend(x + torch.where(WINDOW, 0.0, -1e9), v)


def scale_on_q(q, k, v, keep, rows):
    return attend((q * 0.3) @ k.transpose(-1, -2), v)


def scale_on_both(q, k, v, keep, rows):
    return attend((q / 1.5) @ (k * 0.5).transpose(-1, -2), v)


def scale_after_mask(q, k, v, keep, rows):
    return attend((q @ k.transpose(-1, -2) + torch.where(TRIL, 0.0, -1e9)) * 0.25, v)


def window_from_arange(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(distances().abs() > 2, -math.inf), v)


def tril_in_graph(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(torch.tril(torch.ones(S, S)) == 0, -math.inf), v)


def triu_in_graph(q, k, v, keep, rows):
    return attend(scores(q, k) + torch.triu(torch.full((S, S), -math.inf), diagonal=1), v)


def alibi_causal(q, k, v, keep, rows):
    bias = -SLOPES[:, None, None] * torch.arange(S).flip(0)[None, None]
    return attend((scores(q, k) + bias).masked_fill(~TRIL, -math.inf), v)


def relative_bias_causal(q, k, v, keep, rows):
    bias = torch.nn.functional.embedding(distances().clamp(-16, 15) + 16, TABLE).permute(2, 0, 1)[None]
    return attend(scores(q, k) + (bias + torch.where(TRIL, 0.0, MIN)), v)


def float32_softmax(q, k, v, keep, rows):
    x = scores(q.bfloat16(), k.bfloat16()) + torch.where(TRIL, 0.0, -math.inf).bfloat16()
    return (torch.softmax(x, -1, dtype=torch.float32).to(torch.bfloat16) @ v.bfloat16()).float()


def scores_in_float32(q, k, v, keep, rows):
    x = q.half().float() @ k.half().float().transpose(-1, -2)
    return (torch.softmax(x * 0.3, -1).half() @ v.half()).float()


def clamped(q, k, v, keep, rows):
    x = torch.max(scores(q, k) + torch.where(TRIL, 0.0, MIN), torch.tensor(MIN))
    return attend(x, v)


def three_dimensional(q, k, v, keep, rows):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    x = torch.bmm(q, k.transpose(1, 2)).view(B, H, S, S) + torch.where(TRIL, 0.0, MIN)
    return torch.bmm(torch.softmax(x.view(B * H, S, S), -1), v).view(B, H, S, D)


def baddbmm(q, k, v, keep, rows):
    bias = (SLOPES[:, None, None] * torch.arange(S)).repeat(B, 1, 1)
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    x = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.25).view(B, H, S, S)
    return torch.bmm(torch.softmax(x, -1).view(B * H, S, S), v).view(B, H, S, D)


def einsum(q, k, v, keep, rows):
    x = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(x.masked_fill(~TRIL, -math.inf), -1), v)


def einsum_length_first(q, k, v, keep, rows):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(x, -1), v).transpose(1, 2)


def single_head(q, k, v, keep, rows):
    return attend(scores(q[:, 0], k[:, 0]).masked_fill(~TRIL, -math.inf), v[:, 0])


def no_batch(q, k, v, keep, rows):
    return attend(scores(q[0, 0], k[0, 0]).masked_fill(~TRIL, -math.inf), v[0, 0])


def windows_of_a_batch(q, k, v, keep, rows):
    """Swin: a mask for each window of an image, windows folded into the batch."""
    mask = torch.stack([torch.where(TRIL, 0.0, -1e8), torch.where(TRIL.T, 0.0, -1e8)])
    x = scores(q, k).view(1, 2, H, S, S) + mask[None, :, None]
    return attend(x.view(B, H, S, S), v)


def kv_repeat_interleave(q, k, v, keep, rows):
    k, v = (x[:, :KV_HEADS].repeat_interleave(H // KV_HEADS, dim=1) for x in (k, v))
    return attend(scores(q, k), v)


def kv_expand(q, k, v, keep, rows):
    return attend(scores(q, repeat_kv(k[:, :KV_HEADS])), repeat_kv(v[:, :KV_HEADS]))


def kv_expand_length_first(q, k, v, keep, rows):
    k, v = (
        x[:, :KV_HEADS]
        .transpose(1, 2)[:, :, :, None]
        .expand(B, S, KV_HEADS, H // KV_HEADS, D)
        .reshape(B, S, H, D)
        .transpose(1, 2)
        for x in (k, v)
    )
    return attend(scores(q, k), v)


def kv_single_head(q, k, v, keep, rows):
    return attend(scores(q, k[:, :1]), v[:, :1])


def kv_groups(q, k, v, keep, rows):
    q = q.view(B, KV_HEADS, H // KV_HEADS, S, D)
    k, v = k[:, :KV_HEADS, None], v[:, :KV_HEADS, None]
    return attend(scores(q, k).masked_fill(~TRIL, -math.inf), v).view(B, H, S, D)


def kv_expand_sdpa(q, k, v, keep, rows):
    return nn.functional.scaled_dot_product_attention(
        q, repeat_kv(k[:, :KV_HEADS]), repeat_kv(v[:, :KV_HEADS]), is_causal=True
    )


def padding(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(keep[:, None, None] == 0, MIN), v)


def padding_and_causal(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(~(TRIL & keep[:, None, None].bool()), -math.inf), v)


def padding_and_causal_added(q, k, v, keep, rows):
    allowed = (TRIL[None, None] & (keep != 0)[:, None, None]).expand(B, 1, S, S)
    return attend(scores(q, k) + torch.where(allowed, 0.0, MIN), v)


def padding_times_causal(q, k, v, keep, rows):
    allowed = TRIL.float()[None, None] * keep[:, None, None]
    return attend(scores(q, k).masked_fill(allowed == 0, -1e9), v)


def one_minus_mask(q, k, v, keep, rows):
    allowed = (TRIL & keep[:, None, None].bool()).float()
    return attend(scores(q, k) + (1.0 - allowed) * MIN, v)


def bias_and_padding(q, k, v, keep, rows):
    bias = torch.nn.functional.embedding(distances().clamp(-16, 15) + 16, TABLE).permute(2, 0, 1)[None]
    return attend(scores(q, k) + bias.masked_fill(keep[:, None, None] == 0, MIN), v)


def pattern_at_run_time(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(~rows, -math.inf), v)


def pattern_at_run_time_and_causal(q, k, v, keep, rows):
    return attend(scores(q, k).masked_fill(~(rows & TRIL), -math.inf), v)


KEYS = (B, 1, 1, S)
PER_WINDOW = torch.stack([TRIL, TRIL.T])[:, None]
SPELLINGS = [
    Spelling(plain),
    Spelling(add_float_mask, TRIL, name="softmax(add)"),
    Spelling(add_finfo_min, TRIL, name="softmax(add)"),
    Spelling(subtract_penalty, TRIL, name="softmax(add)"),
    Spelling(masked_fill_inf, WINDOW, name="softmax(where)"),
    Spelling(masked_fill_1e9, TRIL, name="softmax(where)"),
    Spelling(where_finfo_min, TRIL, name="softmax(where)"),
    Spelling(where_reversed, WINDOW, name="softmax(where)"),
    Spelling(two_masks, TRIL & WINDOW, name="softmax(where+add)"),
    Spelling(scale_on_q),
    Spelling(scale_on_both),
    Spelling(scale_after_mask, TRIL, name="softmax(add)"),
    Spelling(window_from_arange, WINDOW, name="softmax(where)"),
    Spelling(tril_in_graph, TRIL, name="softmax(where)"),
    Spelling(triu_in_graph, TRIL, name="softmax(add)"),
    Spelling(alibi_causal, TRIL, (1, H, 1, S), name="softmax(add+where)"),
    Spelling(relative_bias_causal, TRIL, (1, H, S, S), name="softmax(add)"),
    Spelling(float32_softmax, TRIL, name="softmax(add)"),
    Spelling(scores_in_float32),
    Spelling(clamped, TRIL, name="softmax(add+maximum)"),
    Spelling(three_dimensional, TRIL, name="softmax(add)"),
    Spelling(baddbmm, None, (1, H, 1, S), name="softmax(add)"),
    Spelling(einsum, TRIL, name="softmax(where)"),
    Spelling(einsum_length_first),
    Spelling(single_head, TRIL, kv_heads=1, name="softmax(where)"),
    Spelling(no_batch, TRIL, kv_heads=1, name="softmax(where)"),
    Spelling(windows_of_a_batch, PER_WINDOW, name="softmax(add)"),
    Spelling(kv_repeat_interleave, kv_heads=KV_HEADS),
    Spelling(kv_expand, kv_heads=KV_HEADS),
    Spelling(kv_expand_length_first, kv_heads=KV_HEADS),
    Spelling(kv_single_head, kv_heads=1),
    Spelling(kv_groups, TRIL, kv_heads=KV_HEADS, name="softmax(where)"),
    Spelling(kv_expand_sdpa, kv_heads=KV_HEADS, name="sdpa"),
    Spelling(padding, None, KEYS, name="softmax(where)"),
    Spelling(padding_and_causal, TRIL, KEYS, name="softmax(where)"),
    Spelling(padding_and_causal_added, TRIL, KEYS, name="softmax(add)"),
    Spelling(padding_times_causal, TRIL, KEYS, name="softmax(where)"),
    Spelling(one_minus_mask, TRIL, KEYS, name="softmax(add)"),
    Spelling(bias_and_padding, None, (B, H, S, S), name="softmax(add)"),
    Spelling(pattern_at_run_time, None, (B, 1, S, S), name="softmax(where)"),
    Spelling(pattern_at_run_time_and_causal, TRIL, (B, 1, S, S), name="softmax(where)"),
]


class One(nn.Module):
    """One spelling; a module of its own, so that its site has the spelling's name."""

    def __init__(self, spelling):
        super().__init__()
        self.spelling = spelling

    def forward(self, q, k, v, keep, rows):
        if "kv_" not in self.spelling.function.__name__:
            k, v = (x.repeat_interleave(H // KV_HEADS, dim=1) * 1.0 for x in (k, v))
        return self.spelling.function(q, k, v, keep, rows)


class AllSpellings(nn.Module):
    """All of them on the same inputs: one export and one compilation for the whole table."""

    def __init__(self, spellings=SPELLINGS):
        super().__init__()
        for spelling in spellings:
            self.add_module(spelling.function.__name__, One(spelling))

    def forward(self, q, k, v, keep, rows):
        return tuple(child(q, k, v, keep, rows) for child in self.children())
