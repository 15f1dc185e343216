"""A LLaMA-like model, for prompts and, with a cache, for single tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parallel.cases import Case


class Block(nn.Module):
    """RMSNorm, rotary attention and a gated MLP."""

    def __init__(self, case: Case):
        super().__init__()
        self.size = case.dim // case.heads
        small = self.size * case.kv_heads
        linear = lambda inner, outer: nn.Linear(inner, outer, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(case.dim, eps=1e-5), nn.RMSNorm(case.dim, eps=1e-5)
        self.query, self.output = linear(case.dim, case.dim), linear(case.dim, case.dim)
        self.key, self.value = linear(case.dim, small), linear(case.dim, small)
        self.gate, self.up = linear(case.dim, case.hidden), linear(case.dim, case.hidden)
        self.down = linear(case.hidden, case.dim)
        self.cache = case.cache
        if case.cache:
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(1, case.kv_heads, case.cache, self.size))

    def forward(self, x, cos, sin, at=None):
        h = self.norm1(x)
        # -1, not a number of heads: with PyTorch's own division a rank has some of them.
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.query, self.key, self.value))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.cache:
            self.keys.index_copy_(2, at, k)
            self.values.index_copy_(2, at, v)
            keep = (torch.arange(self.cache, device=x.device) <= at[:, None])[None, None]
            out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=keep, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(out.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Ids (batch, length) to the logits of the last position; with a cache, the token at position `at`."""

    def __init__(self, case: Case):
        super().__init__()
        self.tokens = nn.Embedding(case.vocabulary, case.dim)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm, self.head = nn.RMSNorm(case.dim, eps=1e-5), nn.Linear(case.dim, case.vocabulary, bias=False)
        self.size = case.dim // case.heads

    def forward(self, ids, at=None):
        x = self.tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device) if at is None else at
        places = torch.arange(0, self.size, 2, device=ids.device).float() / self.size
        angle = positions.float()[:, None] * 10000.0**-places
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin) if at is None else block(x, cos, sin, at)
        return self.head(self.norm(x[:, -1]))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
