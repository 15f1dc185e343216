"""Small models of the families that people compile, written from scratch: BERT, GPT, LLaMA, T5 and ViT-like."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def split_heads(x, heads):
    """(batch, length, dim) to (batch, heads, length, dim / heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).flatten(2)


class BertLike(nn.Module):
    """Post-norm encoder with a key padding mask and a tanh pooler; returns a tuple."""

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x, keep):
            q, k, v = (split_heads(project(x), self.heads) for project in (self.query, self.key, self.value))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=0.1 if self.training else 0.0)
            x = self.norm1(x + self.dropout(self.output(merge_heads(attended))))
            return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))

    def __init__(self, vocabulary=50, dim=32, heads=4, layers=2, length=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(self.Layer(dim, heads) for _ in range(layers))
        self.pooler = nn.Linear(dim, dim)

    def forward(self, ids, padding=None):
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        keep = None if padding is None else padding[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, keep)
        return x, torch.tanh(self.pooler(x[:, 0]))


class GptLike(nn.Module):
    """Pre-norm decoder with one projection for q, k and v, causal attention and a tied output projection."""

    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

        def forward(self, x):
            q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
            x = x + self.output(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
            return x + self.mlp(self.norm2(x))

    def __init__(self, vocabulary=50, dim=32, heads=4, layers=2, length=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Parameter(0.1 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(self.Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class LlamaLike(nn.Module):
    """RMSNorm, rotary embeddings computed in the graph, grouped-query attention, gated SiLU."""

    class Block(nn.Module):
        def __init__(self, dim, heads, kv_heads):
            super().__init__()
            self.heads, self.kv_heads = heads, kv_heads
            kv_dim = dim // heads * kv_heads
            self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
            self.query, self.output = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
            self.key, self.value = nn.Linear(dim, kv_dim, bias=False), nn.Linear(dim, kv_dim, bias=False)
            self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
            self.down = nn.Linear(2 * dim, dim, bias=False)

        def forward(self, x, cos, sin):
            h = self.norm1(x)
            q, k = split_heads(self.query(h), self.heads), split_heads(self.key(h), self.kv_heads)
            v = split_heads(self.value(h), self.kv_heads)
            q, k = (t * cos + self.rotated(t) * sin for t in (q, k))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.output(merge_heads(attended))
            h = self.norm2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

        @staticmethod
        def rotated(t):
            first, second = t.chunk(2, dim=-1)
            return torch.cat((-second, first), dim=-1)

    def __init__(self, vocabulary=50, dim=32, heads=4, kv_heads=2, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(self.Block(dim, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocabulary, bias=False)
        size = dim // heads
        self.register_buffer("frequency", 10000.0 ** -(torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, ids):
        x = self.tokens(ids)
        angle = torch.outer(torch.arange(ids.shape[1]).float(), self.frequency.float())
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return {"logits": self.head(self.norm(x)), "hidden": x}


class T5Like(nn.Module):
    """Encoder-decoder: learned relative position bias, no scaling, padding by a finite negative number, by hand."""

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.query, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))

        def forward(self, x, source, bias):
            q = split_heads(self.query(x), self.heads)
            k, v = split_heads(self.key(source), self.heads), split_heads(self.value(source), self.heads)
            weights = F.softmax((torch.matmul(q, k.transpose(3, 2)) + bias).float(), dim=-1).type_as(q)
            return self.output(merge_heads(torch.matmul(weights, v)))

    def __init__(self, vocabulary=50, dim=32, heads=4, buckets=8):
        super().__init__()
        self.buckets = buckets
        self.tokens, self.relative = nn.Embedding(vocabulary, dim), nn.Embedding(2 * buckets, heads)
        self.encode, self.decode, self.cross = (self.Attention(dim, heads) for _ in range(3))
        self.wide = nn.Sequential(nn.Linear(dim, 2 * dim, bias=False), nn.ReLU(), nn.Linear(2 * dim, dim, bias=False))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def position_bias(self, length):
        """(1, heads, length, length): a bucket for each sign and logarithm of the distance."""
        position = torch.arange(length)
        distance = position[None, :] - position[:, None]
        bucket = (torch.log2(distance.abs().float() + 1) * self.buckets / math.log2(2 * length)).long()
        bucket = bucket.clamp(max=self.buckets - 1) + (distance > 0).long() * self.buckets
        return self.relative(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, source, target, padding):
        outside = (1.0 - padding[:, None, None, :].to(self.head.weight.dtype)) * -1e4
        x = self.tokens(source)
        x = x + self.encode(x, x, self.position_bias(source.shape[1]) + outside)
        x = x + self.wide(x)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        y = self.tokens(target)
        y = y + self.decode(y, y, self.position_bias(target.shape[1]).masked_fill(~causal, -1e4))
        y = y + self.cross(y, x, outside)
        return self.head(y + self.wide(y))


class VitLike(nn.Module):
    """Patches by convolution, a class token, nn.TransformerEncoder."""

    def __init__(self, dim=32, heads=4, layers=2, size=16, patch=4, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def example_calls(batch=2, length=16) -> dict:
    """Each family's model class with seeded example inputs, by family name."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (batch, length), generator=generator)
    padding = torch.ones(batch, length, dtype=torch.int64)
    padding[-1, length // 2 :] = 0
    return {
        "bert": (BertLike, (ids, padding)),
        "gpt": (GptLike, (ids,)),
        "llama": (LlamaLike, (ids,)),
        "t5": (T5Like, (ids, ids[:, : length // 2], padding)),
        "vit": (VitLike, (torch.randn(batch, 3, 16, 16, generator=generator),)),
    }
