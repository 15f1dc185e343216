"""Small models whose attentions get rules, and the same models in eager PyTorch with `sparse_attention`."""

import torch
from torch import nn

from stof_tvm import masks, sparse_attention

RULES = masks.runtime
LENGTH = 150


class Attend(nn.Module):
    """One attention of (q, k, v) with shared keys; with `rule` it is computed by `sparse_attention`."""

    def __init__(self, is_causal=False, scale=None, rule=None):
        super().__init__()
        self.is_causal, self.scale, self.rule = is_causal, scale, rule

    def forward(self, q, k, v):
        if self.rule is None:
            how = dict(is_causal=self.is_causal, scale=self.scale, enable_gqa=True)
            return nn.functional.scaled_dot_product_attention(q, k, v, **how)
        rule = self.rule & masks.causal() if self.is_causal else self.rule
        return sparse_attention(q, k, v, rule, scale=self.scale, enable_gqa=True)


class Layer(nn.Module):
    """A decoder's layer: projections around `Attend`, the heads beside each other."""

    def __init__(self, size=32, heads=4, kv_heads=2, rule=None):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.kv = nn.Linear(size, size), nn.Linear(size, 2 * kv_heads * size // heads)
        self.attend, self.out = Attend(True, rule=rule), nn.Linear(size, size)

    def forward(self, x):
        batch, length, size = x.shape
        q = self.q(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.kv_heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, size))


class Decoder(nn.Module):
    """Layers in a row; `rules` has the rule of each, or None."""

    def __init__(self, rules=(None, None), dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(rule=rule) for rule in rules).to(dtype).eval()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tensors(seed=0, length=LENGTH, dtype=torch.float32):
    """q of 4 heads, k and v of 2, for 2 batch entries."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, length, 16, generator=generator).to(dtype) for heads in (4, 2, 2))


def hidden(seed=0, dtype=torch.float32):
    return torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def alike(q, k):
    """Blocks of 32 whose first tokens point the same way."""
    k = k[:, :, ::32].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q[:, :, ::32] @ k.transpose(-1, -2) > 0


WEIGHTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


def projected(q, k):
    """The same for all heads and batch entries, by a predictor with weights of its own."""
    x, y = ((z[:1, :1, ::32].float() @ WEIGHTS).sum(-1) for z in (q, k))
    return x[..., None] > y[..., None, :]


MAP = torch.rand(1, 4, 5, 5, generator=torch.Generator().manual_seed(8)) > 0.5

EVERY_RULE = {
    "top_blocks": RULES.top_blocks(2, block=32),
    "top_blocks_causal": RULES.top_blocks(2, block=(32, 64), causal=True),
    "top_blocks_by_bounds": RULES.top_blocks(2, block=32, causal=True, pool="bounds"),
    "vertical_slash": RULES.vertical_slash(6, 6, last=16, sinks=2, window=3, block=32),
    "vertical_slash_of_a_window": RULES.vertical_slash(6, 3, last=16, sinks=2, window=3, block=(32, 64)),
    "xattention": RULES.xattention(16, 0.6, block=32),
    "xattention_of_all": RULES.xattention(8, 0.6, block=32, causal=False),
    "own": RULES.rule(alike, block=32) & masks.sliding_window(90),
    "own_weights": RULES.rule(projected, block=32),
    "constant": RULES.rule(lambda q, k: MAP, block=32),
}
