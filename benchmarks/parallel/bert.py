"""A BERT-like encoder with a window that every system gets as the same boolean mask."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parallel.cases import Case


class Block(nn.Module):
    """Attention and an MLP, a LayerNorm after each."""

    def __init__(self, case: Case):
        super().__init__()
        self.size = case.dim // case.heads
        self.norm1, self.norm2 = nn.LayerNorm(case.dim), nn.LayerNorm(case.dim)
        self.query, self.key, self.value, self.output = (nn.Linear(case.dim, case.dim) for _ in range(4))
        self.up, self.down = nn.Linear(case.dim, case.hidden), nn.Linear(case.hidden, case.dim)

    def forward(self, x, keep):
        # -1, not a number of heads: with PyTorch's own division a rank has some of them.
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.query, self.key, self.value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = self.norm1(x + self.output(out.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Ids (batch, length) to the last hidden state."""

    def __init__(self, case: Case):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(case.vocabulary, case.dim), nn.Embedding(case.q_len, case.dim)
        self.norm = nn.LayerNorm(case.dim)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.length, self.window = case.q_len, case.window

    def forward(self, ids):
        at = torch.arange(self.length, device=ids.device)
        keep = (at[:, None] - at).abs() <= self.window
        x = self.norm(self.tokens(ids) + self.positions(at))
        for block in self.blocks:
            x = block(x, keep)
        return x
