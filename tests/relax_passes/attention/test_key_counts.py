"""Masks that keep the keys before a number known at run time: kernels read the number, however the mask is written."""

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM

B, H, S, D = 2, 2, 48, 8
COUNTED = "keys up to a number that is given at run time"


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v, n):
        return self.function(q, k, v, n)


def sdpa(keep):
    """Attention with a boolean mask that is computed from the last input."""
    return lambda q, k, v, n: F.scaled_dot_product_attention(q, k, v, attn_mask=keep(n))


def by_hand(q, k, v, n):
    scores = q @ k.mT * D**-0.5
    scores = scores.masked_fill(torch.arange(S) >= n, -torch.inf)
    return torch.softmax(scores, -1) @ v


def added(q, k, v, n):
    bias = torch.zeros(S).masked_fill(torch.arange(S) >= n, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def repeated(q, k, v, n):
    keep = (torch.arange(S) < n)[None, None, None].expand(B, H, S, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


places = torch.arange(S)
one, last, each = torch.tensor(31), torch.tensor([30]), torch.tensor([17, 48])
SPELLINGS = {
    "less": (sdpa(lambda n: (places < n)[None]), one),
    "greater": (sdpa(lambda n: (n > torch.arange(S))[None]), one),
    "up to the last": (sdpa(lambda n: (torch.arange(0, S) <= n)[None]), last),
    "negated": (sdpa(lambda n: ~(torch.arange(S) >= n)[None]), one),
    "counted by a sum": (sdpa(lambda n: (torch.ones(S, dtype=torch.int64).cumsum(0) - 1 < n)[None]), one),
    "32 bits": (sdpa(lambda n: (torch.arange(S, dtype=torch.int32) < n)[None]), one.int()),
    "each sequence": (sdpa(lambda n: torch.arange(S) < n[:, None, None, None]), each),
    "each sequence, two dimensions": (sdpa(lambda n: (torch.arange(S)[None] < n[:, None])[:, None, None]), each),
    "spread to all scores": (repeated, one),
    "by hand": (by_hand, one),
    "added": (added, one),
}
NEAR_MISSES = {
    "places from 1 on": (sdpa(lambda n: (torch.arange(1, S + 1) < n)[None]), one),
    "every second place": (sdpa(lambda n: (torch.arange(0, 2 * S, 2) < n)[None]), one),
    "from the end": (sdpa(lambda n: (places.flip(0) < n)[None]), one),
    "the last keys": (sdpa(lambda n: (torch.arange(S) >= n)[None]), one),
    "a number for each key": (sdpa(lambda n: (torch.arange(S) < n)[None]), torch.arange(S) + torch.arange(S) % 2),
    "a number for each query": (sdpa(lambda n: torch.arange(S) < n[:, None]), 1 + torch.arange(S)),
    "a number for each head": (sdpa(lambda n: (torch.arange(S) < n[:, None])[None, :, None]), each),
    "real numbers": (sdpa(lambda n: (torch.arange(S) < n)[None]), one.float()),
    "a finite fill": (
        lambda q, k, v, n: torch.softmax((q @ k.mT).masked_fill(torch.arange(S) >= n, -1.0), -1) @ v,
        one,
    ),
    "and another mask": (sdpa(lambda n: ((torch.arange(S) < n) & (torch.arange(S) % n != 5))[None]), one),
}


def built(function, n, mask=None):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, S, D)
    model = Model(function)
    engine = stof_tvm.build(model, QUICK_LLVM, (q, k, v, n), mask)
    return model, engine, (q, k, v)


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_number_is_read_by_kernels(name):
    function, n = SPELLINGS[name]
    model, engine, qkv = built(function, n)
    (site,) = engine.report().sites
    assert COUNTED in site.notes and "bias" not in "".join(site.notes)
    largest = n.max().item()
    for number in (n, n * 0 + 1, n * 0 + 2 * S, n * 0 + (1 << 40 if n.dtype == torch.int64 else 1 << 30)):
        torch.testing.assert_close(engine(*qkv, number), model(*qkv, number))
    assert largest < 2 * S
    none = engine(*qkv, n * 0 - 3)
    torch.testing.assert_close(none, model(*qkv, n * 0 - 3), equal_nan=True)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_masks_stay_what_they_are(name):
    function, n = NEAR_MISSES[name]
    model, engine, qkv = built(function, n)
    assert not any(COUNTED in site.notes for site in engine.report().sites)
    torch.testing.assert_close(engine(*qkv, n), model(*qkv, n))


def test_beside_a_static_mask():
    function, n = SPELLINGS["each sequence"]
    model, engine, qkv = built(function, n, masks.sliding_window(5) | masks.global_tokens([0]))
    (site,) = engine.report().sites
    assert COUNTED in site.notes and site.density < 0.5
    keep = (masks.sliding_window(5) | masks.global_tokens([0])).dense(S) & (places < n[:, None, None, None])
    torch.testing.assert_close(engine(*qkv, n), F.scaled_dot_product_attention(*qkv, attn_mask=keep))
