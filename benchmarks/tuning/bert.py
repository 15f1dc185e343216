"""BERT-base's encoder written out: 12 layers of width 768, 12 heads, random weights."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS = 30522, 768, 12, 12


class Layer(nn.Module):
    """Post-norm attention and feed-forward."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x):
        heads = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.output(attended))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Token ids (batch, length), int64, to hidden states (batch, length, 768)."""

    def __init__(self, length: int, layers: int = LAYERS):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids):
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return x


def bert_call(batch: int, length: int, device: str, dtype: torch.dtype, layers: int = LAYERS) -> tuple:
    """(model, example inputs), seeded."""
    torch.manual_seed(0)
    model = Bert(length, layers).eval().to(device, dtype)
    return model, (torch.randint(VOCABULARY, (batch, length), device=device),)
