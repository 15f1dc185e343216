"""A LLaMA-like model with random weights, for prompts and, with a cache, for single tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000


TINY = Sizes(2, 64, 4, 4, 128, 100)


class Block(nn.Module):
    """RMSNorm, rotary attention and a gated MLP; `cache` is the length of a cache, 0 for none."""

    def __init__(self, sizes: Sizes, cache: int = 0):
        super().__init__()
        self.size = sizes.dim // sizes.heads
        small = self.size * sizes.kv_heads
        linear = lambda inner, outer: nn.Linear(inner, outer, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(sizes.dim, eps=1e-5), nn.RMSNorm(sizes.dim, eps=1e-5)
        self.query, self.output = linear(sizes.dim, sizes.dim), linear(sizes.dim, sizes.dim)
        self.key, self.value = linear(sizes.dim, small), linear(sizes.dim, small)
        self.gate, self.up = linear(sizes.dim, sizes.hidden), linear(sizes.dim, sizes.hidden)
        self.down = linear(sizes.hidden, sizes.dim)
        self.cache = cache
        if cache:
            for name in ("keys", "values"):
                self.register_buffer(name, torch.zeros(1, sizes.kv_heads, cache, self.size))

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

    def __init__(self, sizes: Sizes, cache: int = 0):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes, cache) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.dim, eps=1e-5), nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        self.size = sizes.dim // sizes.heads

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


def llama(sizes: Sizes, device: str, dtype: torch.dtype, cache: int = 0) -> Llama:
    """The same model on every rank: weights are drawn with a fixed seed, small enough for half precision."""
    with torch.device("meta"):
        model = Llama(sizes, cache).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, x in model.state_dict(keep_vars=True).items():
        if "norm" in name:
            x.data.fill_(1)
        elif name.endswith((".keys", ".values")):
            x.data.zero_()
        else:
            x.data.normal_(0, 0.02, generator=generator)
    return model


def divided_by_pytorch(model: Llama, mesh) -> Llama:
    """The model with DTensor's tensor parallelism, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("query", "key", "value", "gate", "up"), ("output", "down")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan)
        if block.cache:
            block.keys, block.values = (
                x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous() for x in (block.keys, block.values)
            )
    return model
