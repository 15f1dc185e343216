"""A small Transformer whose last layer is read in a few rows, in the ways that models have."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 12, 2


class Layer(nn.Module):
    def __init__(self, kv_heads: int, causal: bool, own_mask: torch.Tensor | None):
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * kv_heads) for _ in range(2))
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.causal = causal
        self.register_buffer("own_mask", own_mask)
        angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.3])
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x, padding=None):
        length = x.shape[1]
        heads = lambda y: y.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
        turn = lambda y: y * self.cos[:length] + torch.cat([-y[..., 2:], y[..., :2]], -1) * self.sin[:length]
        y = self.norm(x)
        q, k, v = turn(heads(self.q(y))), turn(heads(self.k(y))), heads(self.v(y))
        mask = self.own_mask if padding is None else padding[:, None, None, :]
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Reader(nn.Module):
    """x (B, LENGTH, WIDTH) and what `select(hidden, index)` reads of the last layer, index int64 (B,)."""

    def __init__(self, select, kv_heads=HEADS, causal=False, own_mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(kv_heads, causal, own_mask) for _ in range(2))
        self.norm, self.head, self.select = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), select

    def forward(self, x, index, padding=None):
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(self.select(self.norm(x), index))


def gathered(x, index):
    return x.gather(1, index.view(-1, 1, 1).expand(-1, 1, x.shape[-1]))


SELECTIONS = {  # how, and the first and the number of rows that it reads, None where they are given at run time
    "the first row": (lambda x, index: x[:, 0], (0, 1)),
    "the last row": (lambda x, index: x[:, -1:, :], (LENGTH - 1, 1)),
    "some last rows": (lambda x, index: x[:, -3:, :], (LENGTH - 3, 3)),
    "rows inside": (lambda x, index: x.narrow(1, 3, 2), (3, 2)),
    "unbind": (lambda x, index: x.unbind(1)[4], (4, 1)),
    "index_select": (lambda x, index: x.index_select(1, index[:1]), (None, 1)),
    "gather": (gathered, (None, 1)),
    "take_along_dim": (lambda x, index: torch.take_along_dim(x, index[:, None, None] - LENGTH, 1), (None, 1)),
    "indexing by batch and row": (lambda x, index: x[torch.arange(x.shape[0]), index - LENGTH], (None, 1)),
}
SAME_FOR_ALL = ("index_select",)
