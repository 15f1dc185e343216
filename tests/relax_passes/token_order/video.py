"""A small video transformer, row by row, with something between its layers."""

import torch
from torch import nn
from torch.nn import functional as F

CANVAS, TILE, WINDOW = (3, 4, 6), (2, 2, 3), (2, 2, 3)
TOKENS, CHANNELS, WIDTH, HEADS, TEXT = 72, 3, 16, 2, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angles = torch.arange(TOKENS)[:, None] * torch.linspace(0.1, 1, WIDTH // HEADS // 2)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x, causal=False):
        heads = lambda y: y.unflatten(2, (HEADS, -1)).transpose(1, 2)
        q, k, v = (heads(y) for y in self.qkv(x).chunk(3, dim=-1))
        turned = lambda y: y * self.cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * self.sin
        found = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, text):
        heads = lambda y: y.unflatten(2, (HEADS, -1)).transpose(1, 2)
        k, v = (heads(y) for y in self.kv(text).chunk(2, dim=-1))
        return F.scaled_dot_product_attention(heads(self.q(x)), k, v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.cross, self.norm = Attention(), Cross(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x, text):
        x = x + self.attention(self.norm(x))
        x = x + self.cross(x, text)
        return x + self.mlp(x)


class Video(nn.Module):
    """(B, CHANNELS, 3, 4, 6) and text (B, TEXT, WIDTH) to the same shape; `between` is done between the layers."""

    def __init__(self, between=lambda model, x: x, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv3d(CHANNELS, WIDTH, 1)
        self.positions = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.extra, self.convolution = Attention(), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.out = nn.Linear(WIDTH, CHANNELS)
        self.between = between

    def forward(self, video, text):
        x = self.patches(video).flatten(2).transpose(1, 2) + self.positions
        for number, layer in enumerate(self.layers):
            x = layer(self.between(self, x) if number else x, text)
        return self.out(x).transpose(1, 2).unflatten(2, CANVAS)


def make_inputs(batch: int = 1):
    return torch.randn(batch, CHANNELS, *CANVAS), torch.randn(batch, TEXT, WIDTH)


# What may be between layers, and the operator that a report names where it may not.
TOKENWISE = {
    "nothing": lambda model, x: x,
    "gates by the mean of all tokens": lambda model, x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    "a norm by the largest of all tokens": lambda model, x: x / x.abs().amax((1, 2), keepdim=True),
    "attention without a mask": lambda model, x: x + model.extra(x),
    "another constant for each token": lambda model, x: x * torch.linspace(1, 2, TOKENS)[:, None],
    "products of channels": lambda model, x: x + x @ torch.softmax(x.mT @ x / TOKENS, -1),
}
MIXING = {
    "a sum up to each token": (lambda model, x: x + x.cumsum(1) / TOKENS, "cumsum"),
    "a convolution of neighbours": (lambda model, x: x + model.convolution(x.mT).mT, "conv1d"),
    "tokens in reverse": (lambda model, x: x.flip(1), "take"),
    "neighbours subtracted": (lambda model, x: x - x.roll(1, 1), "strided_slice"),
    "causal attention": (lambda model, x: x + model.extra(x, causal=True), "attention 'extra' depends on the places"),
    "softmax over tokens": (lambda model, x: x * torch.softmax(x, 1), "nn.softmax"),
    "means of frames": (lambda model, x: x + x.unflatten(1, CANVAS).mean((2, 3)).repeat_interleave(24, 1), "reshape"),
    "products of tokens": (lambda model, x: x + torch.tanh(x @ x.mT) @ x / TOKENS, "two axes"),
    "a gate by the first token": (lambda model, x: x * torch.sigmoid(x[:, :1]), "strided_slice"),
    "a gate by the deviation of tokens": (lambda model, x: x / (x.std(1, keepdim=True) + 1), "variance"),
    "a gate by the last of a sum": (lambda model, x: x * torch.sigmoid(x.cumsum(1)[:, -1:]), "cumsum"),
    "every other token": (lambda model, x: x[:, ::2].repeat_interleave(2, 1), "strided_slice"),
}
