"""Zeros in the rows that keys and values are projected from, where that makes their padding finite, and only there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.stof_tvm.frontend.padding.poison import Model, assert_same, exported, padded_for, run_poisoned

aten = torch.ops.aten
SIZES = [3, 16]  # of the bucket


def x_of(batch=2, length=9, width=8):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(length))


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attend(q, k, v, **more):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), **more).transpose(1, 2).flatten(2)


def separate(m, x):
    x = m.norm(x)
    return x + attend(m.q(x), m.k(x), m.v(x), is_causal=True)


def packed(m, x):
    return attend(*m.qkv(m.norm(x)).chunk(3, -1))


def rotary(m, x):
    x = m.norm(x)
    angle = torch.arange(x.shape[1])[:, None] / torch.tensor([1.0, 10.0])
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    q, k = (heads(p(x)) for p in (m.q, m.k))
    q, k = (y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin for y in (q, k))
    return F.scaled_dot_product_attention(q, k, heads(m.v(x)))


def layers(m, x):
    return separate(m, separate(m, x))


def two_products(m, x):
    """The keys' own projection has a finite bias, whatever the product before it gives."""
    return attend(m.q(x), m.k(m.v(x)), m.v(x))


def normed_keys(m, x):
    x = m.norm(x)
    return attend(m.q(x), F.normalize(m.k(x), dim=-1), m.v(x))


def gated(m, x):
    """A factor of keys of padding comes from rows that are none, and may be anything."""
    return attend(m.q(x), m.k(x) * m.v(x.amax(1, keepdim=True)), m.v(x))


def large(m, x):
    return attend(m.q(x), m.k(x) * 1e6, m.v(x))


def infinite(m, x):
    return attend(m.q(x), F.linear(x, m.holes), m.v(x))


def summed(m, x):
    """Keys of padding are sums of those of real tokens."""
    return attend(m.q(x), m.k(x).cumsum(1), m.v(x))


def no_projection(m, x):
    return attend(m.q(x), x, m.v(x))


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    linears = {name: nn.Linear(8, 8 * (3 if name == "qkv" else 1)) for name in ("q", "k", "v", "qkv")}
    holes = torch.randn(8, 8)
    holes[3, 3] = torch.inf
    return {**linears, "norm": nn.LayerNorm(8), "holes": nn.Parameter(holes)}


def zeroed(function, parts) -> list[str]:
    """What is filled with zeros: the operator whose result it is."""
    x = x_of()
    padded, *_ = padded_for(*exported(Model(function, **parts), (x,)), [x], SIZES)
    found = []
    for node in padded.program.graph.nodes:
        if node.target is aten.where.ScalarOther and node.args[2] == 0 and node.args[1].target is not node.target:
            found.append(str(node.args[1].target))
    return found


@pytest.mark.parametrize(
    "function, expected",
    [
        (separate, ["aten.layer_norm.default"]),
        (packed, ["aten.layer_norm.default"]),
        (rotary, ["aten.layer_norm.default"]),
        (layers, ["aten.layer_norm.default"] * 2),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_rows_that_are_projected_are_zeros(function, expected, parts):
    assert zeroed(function, parts) == expected


@pytest.mark.parametrize("function", [normed_keys, gated, large, infinite, summed, no_projection])
def test_keys_that_may_be_anything_are_zeros_themselves(function, parts):
    assert "aten.permute.default" in zeroed(function, parts), "the keys of all heads"


@pytest.mark.parametrize(
    "function", [separate, packed, rotary, layers, two_products, normed_keys, gated, large, summed, no_projection]
)
def test_padding_reaches_no_result(function, parts):
    model = Model(function, **parts)
    program, shapes = exported(model, (x_of(),))
    for batch, length in ((2, 9), (3, 16), (2, 2)):
        values = [x_of(batch, length)]
        assert_same(run_poisoned(program, shapes, values, SIZES), model(*values))
