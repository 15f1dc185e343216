"""Small modules of padded batches: each computes one thing that a rule of packing is about."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LONGEST = 16, 4, 12


class Padded(nn.Module):
    """`f(self, x, mask)` of x (B, S, C) and an int64 attention_mask (B, S)."""

    def __init__(self, f):
        super().__init__()
        torch.manual_seed(3)
        self.f = f
        self.linear, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.table = nn.Parameter(torch.randn(LONGEST + 2, WIDTH))
        self.bias = nn.Parameter(torch.randn(2 * LONGEST, HEADS))
        self.register_buffer("numbers", torch.arange(LONGEST + 2)[None])
        self.register_buffer("causal", torch.ones(1, 1, LONGEST, LONGEST).tril() == 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, attention_mask):
        return self.f(self, x, attention_mask)


def heads(m, x):
    return m.qkv(x).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)


def attend(m, x, change):
    """Attention written out; `change(scores)` is what becomes of the scores before their softmax."""
    q, k, v = heads(m, x)
    weights = torch.softmax(change(q @ k.transpose(-1, -2) / 2), -1)
    return (weights @ v).transpose(1, 2).flatten(2)


def sdpa(m, x, mask, **more):
    q, k, v = heads(m, x)
    return F.scaled_dot_product_attention(q, k, v, mask, **more).transpose(1, 2).flatten(2)


def keys(mask):
    return mask[:, None, None, :] == 1


def distance(x):
    place = torch.arange(x.shape[1])
    return place[None, :] - place[:, None]


def added(mask, lowest=-1e9):
    return (1.0 - mask[:, None, None, :].float()) * lowest


def masked(x, s):
    """Scores that the model's causal mask has been over."""
    return s.masked_fill(distance(x) > 0, -torch.inf)


def windows(x, s):
    """Scores with a window of its own for each head."""
    return s + torch.where(distance(x).abs() <= torch.arange(HEADS)[:, None, None], 0.0, -torch.inf)


def after_mask(change, mask=masked):
    """A module that changes scores after their mask, and what it is refused by."""
    told = "changes scores after the model has masked some"
    return lambda m, x, _: attend(m, x, lambda s: change(mask(x, s))), told


def joined(m, x, mask):
    """Heads joined with the batch, in bmm."""
    q, k, v = (y.flatten(0, 1) for y in heads(m, x))
    scores = torch.bmm(q, k.transpose(1, 2)).unflatten(0, (-1, HEADS)).masked_fill(~keys(mask), -torch.inf)
    return torch.bmm(torch.softmax(scores, -1).flatten(0, 1), v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


TOKENS = {
    "features": lambda m, x, mask: F.gelu(m.linear(m.norm(x))) + x.mean(-1, keepdim=True) + x.flip(2),
    "softmax of features": lambda m, x, mask: torch.softmax(m.linear(x), -1),
    "rows": lambda m, x, mask: m.linear(x.flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[1])),
    "tokens first": lambda m, x, mask: m.norm(m.linear(x.transpose(0, 1))).transpose(0, 1),
    "as it comes": lambda m, x, mask: m.linear(x).transpose(1, 2),
    "gated by its first": lambda m, x, mask: x * torch.sigmoid(m.linear(x[:, :1])),
    "a table": lambda m, x, mask: x + m.table[: x.shape[1]],
    "a table from 2 on": lambda m, x, mask: x + m.table[2 : x.shape[1] + 2],
    "an embedding": lambda m, x, mask: x + F.embedding(m.numbers[:, : x.shape[1]], m.table),
    "numbers in pairs": lambda m, x, mask: x + m.table[torch.arange(x.shape[1]) + 1],
    "sines": lambda m, x, mask: x * torch.sin(torch.arange(x.shape[1])[:, None] * m.table[0]),
    "counted": lambda m, x, mask: x + F.embedding((mask.cumsum(1) - 1).clamp(min=0), m.table),
    "a whole attention": lambda m, x, mask: sdpa(m, x, keys(mask)),
    "a causal one": lambda m, x, mask: sdpa(m, x, None, is_causal=True),
    "a causal buffer": lambda m, x, mask: sdpa(m, x, m.causal[:, :, : x.shape[1], : x.shape[1]] & keys(mask)),
    "a triangle": lambda m, x, mask: sdpa(
        m, x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & keys(mask)
    ),
    "a window": lambda m, x, mask: sdpa(m, x, (distance(x).abs() <= 2) & keys(mask)),
    "gaps": lambda m, x, mask: sdpa(m, x, (distance(x) % 3 == 0) & keys(mask)),
    "blocks": lambda m, x, mask: sdpa(
        m, x, (torch.arange(x.shape[1])[None] // 4 == torch.arange(x.shape[1])[:, None] // 4) & keys(mask)
    ),
    "slopes": lambda m, x, mask: attend(
        m, x, lambda s: s - distance(x).abs() * m.bias[0, :, None, None].abs() + added(mask)
    ),
    "causal slopes": lambda m, x, mask: attend(
        m, x, lambda s: s + torch.where(distance(x) <= 0, distance(x) * 0.5, torch.finfo(s.dtype).min) + added(mask)
    ),
    "distances": lambda m, x, mask: sdpa(
        m, x, m.bias[distance(x) + LONGEST].permute(2, 0, 1)[None] + added(mask, torch.finfo(x.dtype).min)
    ),
    "written out": lambda m, x, mask: attend(m, x, lambda s: s.masked_fill(~keys(mask), -torch.inf)),
    "added": lambda m, x, mask: attend(m, x, lambda s: s + added(mask, -10000.0)),
    "chosen": lambda m, x, mask: attend(
        m, x, lambda s: torch.where((distance(x) <= 0) & keys(mask), s, torch.finfo(s.dtype).min)
    ),
    "filled with less": lambda m, x, mask: attend(m, x, lambda s: s.masked_fill(mask[:, None, None] == 0, -1e4)),
    "halved after its mask": lambda m, x, mask: attend(
        m, x, lambda s: s.masked_fill(distance(x) > 0, -torch.inf) / 2 + m.bias[0, 0]
    ),
    "a bias of its own": lambda m, x, mask: sdpa(m, x, (x @ x.mT)[:, None].masked_fill(distance(x) > 1, -torch.inf)),
    "chosen or low at padding": lambda m, x, mask: attend(
        m, x, lambda s: torch.where(distance(x) <= 0, s, added(mask, torch.finfo(s.dtype).min))
    ),
    "chosen or a copy": lambda m, x, mask: attend(
        m, x, lambda s: torch.where(distance(x) <= 0, s, torch.full((), -torch.inf, dtype=torch.float64).to(s.dtype))
    ),
    "grouped after its mask": lambda m, x, mask: attend(
        m, x, lambda s: masked(x, s).unflatten(1, (2, 2)).flatten(1, 2) + torch.zeros_like(masked(x, s))
    ),
    "a window for each head": lambda m, x, mask: attend(m, x, lambda s: windows(x, s)[None].squeeze(0)),
    "one head's scores": lambda m, x, mask: attend(m, x, lambda s: masked(x, s)[:, :1].expand(-1, HEADS, -1, -1)),
    "capped": lambda m, x, mask: attend(m, x, lambda s: torch.tanh(s / 5) * 5 + added(mask)),
    "heads in the batch": joined,
    "by what tokens are": lambda m, x, mask: sdpa(m, x, keys(mask) & (x[:, None, None, :, 0] > -9)),
}

SEQUENCES = {
    "first": lambda m, x, mask: m.linear(x[:, 0]),
    "last": lambda m, x, mask: m.linear(x)[:, -1],
    "mean": lambda m, x, mask: (x * mask[..., None]).sum(1) / mask.sum(1)[:, None],
    "clamped mean": lambda m, x, mask: (
        (m.linear(x) * mask[..., None].expand(x.shape).float()).sum(1, keepdim=True)
        / mask[..., None].expand(x.shape).float().sum(1, keepdim=True).clamp(min=1e-9)
    ),
    "filled": lambda m, x, mask: x.masked_fill(mask[..., None] == 0, 0.0).sum(1),
    "at its length": lambda m, x, mask: m.norm(x[torch.arange(x.shape[0]), mask.sum(1) - 1]),
    "classes": lambda m, x, mask: torch.softmax(m.linear(torch.cat([x[:, 0], x[:, -1]], -1).unflatten(1, (2, -1))), -1),
}

REFUSED = {
    "convolution": (lambda m, x, mask: m.conv(x.transpose(1, 2)), "aten.conv"),
    "sum": (lambda m, x, mask: x.sum(1), "padding is not known to be 0"),
    "mean": (lambda m, x, mask: x.mean(1), "aten.mean.dim in the root module .* goes over tokens"),
    "the wrong mask's mean": (lambda m, x, mask: (x * (1 - mask)[..., None]).sum(1), "padding is not known to be 0"),
    "largest": (lambda m, x, mask: x.amax(1), "goes over tokens"),
    "running sums": (lambda m, x, mask: x.cumsum(1), "aten.cumsum"),
    "backwards": (lambda m, x, mask: x.flip(1), "goes over tokens"),
    "shifted": (lambda m, x, mask: F.pad(x, (0, 0, 1, 0))[:, :-1], "cannot be computed without padding"),
    "the second": (lambda m, x, mask: x[:, 1], "takes some of the tokens"),
    "every other": (lambda m, x, mask: x[:, ::2], "without padding"),
    "norm over tokens": (lambda m, x, mask: torch.softmax(x, 1), "goes over tokens"),
    "more tokens": (lambda m, x, mask: torch.cat([x[:, :1], x], 1), "adds tokens|takes some"),
    "over the length": (lambda m, x, mask: x / x.shape[1], "length of the batch"),
    "row numbers": (lambda m, x, mask: x + torch.arange(x.shape[0])[:, None, None], "number of a sequence"),
    "across the batch": (lambda m, x, mask: x - x.mean(0, keepdim=True), "goes over tokens or sequences"),
    "one sequence": (lambda m, x, mask: x + x[0], "takes some of the tokens"),
    "linear attention": (lambda m, x, mask: x @ (x.transpose(1, 2) @ x), "sums over tokens"),
    "similarities": (lambda m, x, mask: x @ x.transpose(1, 2), "neither one entry for each token"),
    "weights": (
        lambda m, x, mask: attend(m, x, lambda s: s * 1) + 0 * torch.softmax(x @ x.mT, 1)[:, :, :1],
        "goes over",
    ),
    "changed weights": (
        lambda m, x, mask: (torch.softmax(x @ x.mT + added(mask)[:, 0], -1) + 0.1) @ x,
        "changes the weights of an attention",
    ),
    "inverted": (lambda m, x, mask: sdpa(m, x, ~keys(mask)), "keeps nothing of a sequence|does not mask the keys"),
    "only queries": (
        lambda m, x, mask: sdpa(m, x, (mask[:, None, :, None] == 1) & (distance(x) < 99)),
        "does not mask",
    ),
    "weakly": (lambda m, x, mask: attend(m, x, lambda s: s + added(mask, -5.0)), "does not mask the keys"),
    "bounded after its mask": (
        lambda m, x, mask: attend(m, x, lambda s: torch.tanh(s.masked_fill(distance(x) > 0, -torch.inf))),
        "changes scores after the model has masked some",
    ),
    "split after its mask": after_mask(lambda s: torch.cat(s.split(2, 1)[::-1], 1)),
    "joined after its mask": after_mask(lambda s: torch.cat([s, s * 2], 1)[:, ::2]),
    "averaged after its mask": after_mask(lambda s: s.mean(1, keepdim=True).expand_as(s)),
    "heads backwards": after_mask(lambda s: s.flip(1)),
    "heads selected": after_mask(lambda s: s.index_select(1, torch.arange(HEADS).flip(0))),
    "queries after keys": after_mask(lambda s: s.mT),
    "heads last": after_mask(lambda s: s.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2)),
    "softmax of heads": after_mask(lambda s: s.softmax(1)),
    "true where masked": (
        lambda m, x, mask: sdpa(m, x, masked(x, x @ x.mT)[:, None].to(torch.bool)),
        "changes scores after the model has masked some",
    ),
    "another head's window": after_mask(lambda s: s[:, 1:2].expand(-1, HEADS, -1, -1), windows),
    "windows of one head's scores": (
        lambda m, x, mask: attend(m, x, lambda s: windows(x, s[:, :1])),
        "a dimension of its result was taken for",
    ),
    "sorted": (lambda m, x, mask: x.sort(1).values, "aten.sort"),
    "random": (lambda m, x, mask: x + torch.rand_like(x), "aten.rand"),
    "scattered": (lambda m, x, mask: x.index_add(1, torch.zeros(x.shape[1], dtype=torch.long), x), "aten.index"),
}
