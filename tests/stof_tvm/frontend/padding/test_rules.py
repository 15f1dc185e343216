"""Each operator's rule: with poison for padding a program computes what PyTorch does without padding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from stof_tvm.errors import UnsupportedError
from tests.stof_tvm.frontend.padding.poison import SIZES, Model, assert_same, exported, run_poisoned

WIDTH = 6


def x_of(batch: int, length: int) -> tuple:
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(batch, length, WIDTH, generator=generator),)


def heads(x, count=2):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def arange(x):
    return torch.arange(x.shape[1])


def attention(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)


def written_out(m, x):
    q, k, v = (heads(y) for y in m.qkv(x).chunk(3, -1))
    return (torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(3), -1) @ v).transpose(1, 2).reshape(x.shape)


def windowed(m, x):
    near = (arange(x)[:, None] - arange(x)[None]).abs() <= 2
    return F.scaled_dot_product_attention(x, x, x, attn_mask=near)


def biased(m, x):
    bias = -(arange(x)[:, None] - arange(x)[None]).abs().float()
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


def large(x):
    """Integers that float32 does not hold."""
    return (x * 9).long() + 2**27 + 1


def nan_rows(x):
    return x.masked_fill(x[:, :1] < 0, -math.inf).softmax(1)


def grouped(m, x):
    q = heads(m.linear(x), 6)
    k = heads(m.narrow(x), 3)
    return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def key_padding(m, x):
    keep = x[:, :, 0] > -0.5
    keep = keep | (arange(x) == 0)
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=keep[:, None, None, :])


def one_key_mask(m, x):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=x[..., :1] * 0)


COMPUTED = {
    "linear": lambda m, x: m.linear(x),
    "sum": lambda m, x: (x.sum(1), x.sum(), x.sum((0, 1)), x.sum(-1)),
    "mean": lambda m, x: (x.mean(1), x.mean(), x.mean((0, 1), keepdim=True), x.mean(-1)),
    "half mean": lambda m, x: x.half().mean(1),
    "variance": lambda m, x: (x.var(1), x.var(1, correction=0, keepdim=True), x.std(1), x.var()),
    "variance and mean": lambda m, x: torch.var_mean(x, 1),
    "extremes": lambda m, x: (x.amax(1), x.amin(1), x.max(), x.min(), x.amax((0, 1))),
    "places": lambda m, x: (x.argmax(1), x.argmin(1), *x.max(1), *x.min(1), x.argmax(-1)),
    "integers": lambda m, x: ((x * 9).long().amax(1), (x * 9).int().amin(1), (x * 9).long().sum(1)),
    "logic": lambda m, x: ((x > 1).any(1), (x > -1).all(1), (x > 0).sum(1), (x > 0).any(), x.bool().all()),
    "products of elements": lambda m, x: x.prod(1),
    "logsumexp": lambda m, x: (x.logsumexp(1), x.logsumexp((0, 1))),
    "norms": lambda m, x: (x.norm(dim=1), torch.linalg.vector_norm(x, 1, 1), F.normalize(x, dim=1)),
    "softmax": lambda m, x: (x.softmax(1), x.log_softmax(1), x.softmax(-1)),
    "softmax of floats": lambda m, x: x.half().softmax(1, dtype=torch.float32),
    "scans": lambda m, x: (x.cumsum(1), x.cumprod(1), x.logcumsumexp(1), *x.cummax(1), x.cumsum(-1)),
    "positions": lambda m, x: (x + m.table[: x.shape[1]], x * arange(x)[:, None], m.positions(arange(x))),
    "running mean": lambda m, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "sizes": lambda m, x: (x / x.shape[1], x * x.shape[1] ** -0.5, x + x.shape[0], x.clamp(max=x.shape[1] / 9)),
    "a size as a result": lambda m, x: (x, x.shape[1], x.shape[0] * 2, torch.full((2,), x.shape[1])),
    "memory that is written whole": lambda m, x: torch.empty_like(x).copy_(x).add_(1),
    "memory of a size that is written whole": lambda m, x: x.new_empty(x.shape[1], 3).fill_(2).mul_(x.shape[1]),
    "whole tensors": lambda m, x: (torch.full_like(x, 2), torch.full((x.shape[1],), x.shape[1] * 1.5), x.new_ones(3)),
    "slices": lambda m, x: (x[:, 1:], x[:, :-1], x[:, ::2], x[:, :2], x[:, -2:], x[:, -3:-1], x[:, 1:3]),
    "rows": lambda m, x: (x[:, 0], x[:, -1], x[:, 1], x[0], x[:, x.shape[1] - 2]),
    "views": lambda m, x: (x.reshape(-1, WIDTH), x.reshape(x.shape[0], -1), x.flatten(), x.view(*x.shape[:2], 2, 3)),
    "joined rows": lambda m, x: m.linear(x.view(-1, WIDTH)).view(x.shape).softmax(1),
    "sums of joined rows": lambda m, x: (x.reshape(-1, WIDTH).sum(0), x.reshape(-1, WIDTH).mean(0), x.flatten().amax()),
    "heads and rows joined": lambda m, x: heads(x).reshape(x.shape[0] * 2, x.shape[1], 3).transpose(1, 2),
    "heads outside": lambda m, x: x.transpose(0, 1).permute(2, 1, 0).reshape(2, 3, x.shape[0], -1),
    "repeats": lambda m, x: (
        x.repeat(1, 2, 1), x.repeat(2, 1, 1), x.repeat_interleave(3, 1), x[:, :, None].expand(-1, -1, 4, -1)
    ),
    "sum of repeats": lambda m, x: (x.repeat(1, 2, 1).sum(1), x.repeat(3, 1, 1).mean(0)),
    "joined": lambda m, x: (torch.cat([x[:, :1], x], 1), torch.cat([x, x[:, :2]], 1), torch.cat([x, x * 2, x], 1)),
    "joined and summed": lambda m, x: torch.cat([x, x.cumsum(1)], 1).mean(1),
    "stacked": lambda m, x: (torch.stack([x, x * 2]), torch.stack([x, x * 2], 1), torch.cat([x, x], -1), *x.unbind(-1)),
    "padded": lambda m, x: (F.pad(x, (0, 0, 1, 2)), F.pad(x, (1, 0, 0, 1), value=3.0).sum(1)),
    "rolled": lambda m, x: (x.roll(1, 1), F.pad(x.mT, (2, 1), mode="reflect"), F.pad(x.mT, (2, 1), mode="replicate")),
    "padding inside": lambda m, x: (
        x.repeat(1, 2, 1)[:, 3:], x.repeat(1, 2, 1).cumsum(1), x.repeat(1, 2, 1)[:, -1], m.conv(x.repeat(1, 2, 1).mT),
        torch.cat([x.repeat(1, 2, 1), x], 1), x.repeat(1, 2, 1).argmax(1), heads(x.repeat(1, 2, 1))[..., 1:, :],
        (x.repeat(1, 2, 1) + torch.cat([x, x], 1)).mean(1), F.pad(x.repeat(1, 2, 1), (0, 0, 1, 1)),
    ),
    "shifted": lambda m, x: x - F.pad(x[:, :-1], (0, 0, 1, 0)),
    "matrix products": lambda m, x: (x @ x.transpose(1, 2), x.transpose(1, 2) @ x, torch.bmm(x, x.mT), x[0].T @ x[0]),
    "einsum": lambda m, x: (torch.einsum("bnd,bmd->bnm", x, x), torch.einsum("bnd,bne->bde", x, x)),
    "weighted": lambda m, x: (x.softmax(1).mT @ x.exp(), (x[..., 0] @ x.mean(0)).sum()),
    "norms of rows": lambda m, x: (m.norm(x), F.rms_norm(x, (WIDTH,)), F.group_norm(x[:, 0], 2), F.gelu(x), F.silu(x)),
    "batch norm": lambda m, x: m.batch_norm(x.mT),
    "attention": attention,
    "attention written out": written_out,
    "window": windowed,
    "bias": biased,
    "groups of heads": grouped,
    "padding of keys": key_padding,
    "mask of one key": one_key_mask,
    "causal": lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "causal mask": lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=arange(x)[:, None] >= arange(x)),
    "causal bias": lambda m, x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.full((x.shape[1],) * 2, -math.inf).triu(1)
    ),
    "few queries": lambda m, x: F.scaled_dot_product_attention(m.queries.expand(x.shape[0], -1, -1), x, x),
    "few keys": lambda m, x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2]),
    "convolution": lambda m, x: (m.conv(x.mT), m.deep(x.mT), m.dilated(x.mT).sum(-1)),
    "convolution with strides": lambda m, x: m.strided(x.mT).mT,
    "convolutions": lambda m, x: m.conv(F.gelu(m.conv(x.mT))).mean(-1),
    "convolution up": lambda m, x: m.up(x.mT),
    "convolution of images": lambda m, x: m.image(x[:, None]),
    "pooling": lambda m, x: (
        F.avg_pool1d(x.mT, 2), F.max_pool2d(x.mT, (1, 3), (1, 2), (0, 1)), F.avg_pool1d(x.mT, 3, 1, 1)
    ),
    "pooling to one": lambda m, x: (F.adaptive_avg_pool1d(x.mT, 1), F.adaptive_max_pool1d(x.mT, 1)),
    "indices": lambda m, x: (x[:, torch.tensor([0, 2])], x[:, torch.tensor([0, -1])], x[torch.tensor([1, 0])]),
    "last of each": lambda m, x: x[torch.arange(x.shape[0]), (x[..., 0] > 0).sum(1) - 1],
    "gathered": lambda m, x: (x.gather(1, (x[:, :1] > 0).long()), m.words((x > 0).long()), x.gather(-1, x.argsort(-1))),
    "sorted rows": lambda m, x: (*x.sort(-1), *x.topk(2, -1), x.flip(-1), x.roll(1, -1)),
    "triangles": lambda m, x: ((x @ x.mT).tril(), (x @ x.mT).triu(1).sum(-1)),
    "fills": lambda m, x: (x.masked_fill(x > 0, -math.inf).softmax(1).nan_to_num(), torch.where(x > 0, x, x.shape[1])),
    "writes of fixed places": lambda m, x: x.slice_scatter(x[..., :2] * 2, 2, 1, 3) + x.select_scatter(x[..., 0], 2, 1),
    "lengths from the end": lambda m, x: (
        m.table[-x.shape[1] :], m.table[-x.shape[1]], m.table[-x.shape[1] : -1], m.table[-x.shape[1] :: 2],
        x[:, -x.shape[1]], torch.cat([x, x[:, :3]], 1)[:, -x.shape[1] :].sum(1),
    ),
    "repeats as often as there are others": lambda m, x: (
        x.softmax(1).repeat(1, x.shape[0], 1).sum(1), F.pad(x, (0, 0, 1, 1)).repeat(1, x.shape[0], 1).sum(1)
    ),
    "padding of integers": lambda m, x: (
        F.pad(large(x), (0, 0, 1, 1)), F.pad(large(x), (0, 0, 1, 1), value=-1), large(x).mT @ large(x),
        torch.einsum("bnd,bne->bde", large(x), large(x)), F.pad(x > 0, (0, 0, 1, 1), value=True).all(1),
        m.words(F.pad((x[..., 0] > 0).long(), (1, 0))), F.pad((x * 9).to(torch.uint8), (0, 0, 1, 1)),
    ),
    "rows of NaN": lambda m, x: (
        nan_rows(x).bool().sum(1), nan_rows(x).nan_to_num(3).long().sum(1), F.pad(nan_rows(x), (0, 0, 0, 1)),
        nan_rows(x).sum(1), x.softmax(1).bool().sum(1), torch.logical_and(nan_rows(x), ~(x * x >= 0)).any(1),
    ),
    "distances": lambda m, x: (x[:, :, None] - x[:, None]).norm(dim=-1).amin(-1),
}  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    return {
        "linear": nn.Linear(WIDTH, WIDTH), "narrow": nn.Linear(WIDTH, 3), "qkv": nn.Linear(WIDTH, 3 * WIDTH),
        "table": nn.Parameter(torch.randn(64, WIDTH)), "positions": nn.Embedding(64, 4), "words": nn.Embedding(9, 4),
        "queries": nn.Parameter(torch.randn(3, WIDTH)), "norm": nn.LayerNorm(WIDTH),
        "batch_norm": nn.BatchNorm1d(WIDTH),
        "conv": nn.Conv1d(WIDTH, WIDTH, 3, padding=1), "deep": nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding="same"),
        "strided": nn.Conv1d(WIDTH, 4, 3, stride=2), "dilated": nn.Conv1d(WIDTH, 4, 2, dilation=2, padding=2),
        "up": nn.ConvTranspose1d(WIDTH, 4, 3, stride=2, padding=1), "image": nn.Conv2d(1, 2, 3, padding=1),
    }  # fmt: skip


GROUPS = [list(COMPUTED)[start : start + 8] for start in range(0, len(COMPUTED), 8)]


@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_padding_reaches_no_result(names, parts):
    model = Model(lambda m, x: [COMPUTED[name](m, x) for name in names], **parts)
    program, shapes = exported(model, x_of(3, 7), least=5)
    for length, bucket in SIZES:
        inputs = x_of(2, length)
        found = run_poisoned(program, shapes, list(inputs), [3, bucket])
        with torch.no_grad():
            expected = model(*inputs)
        for name, own in zip(names, expected, strict=True):
            count = len(pytree.tree_leaves(own))
            try:
                assert_same(found[:count], own)
            except AssertionError as error:
                raise AssertionError(f"{name} of {length} in {bucket}: {error}") from None
            found = found[count:]


def test_halves_are_counted_from_the_real_end():
    def halves(m, x):
        half = x.shape[1] // 2
        return x[:, -half:], x[:, -half], x[:, -half:-1].sum(1), x[:, : -half + 1]

    program, shapes = exported(Model(halves), x_of(3, 8), [{1: 2 * Dim("half", min=2, max=16)}])
    for length, half in ((6, 5), (10, 5), (10, 8)):
        inputs = x_of(3, length)
        assert_same(run_poisoned(program, shapes, list(inputs), [half]), halves(None, *inputs))


REFUSED = {
    "sort": (lambda m, x: x.sort(1)[0], "aten.sort"),
    "flip": (lambda m, x: x.flip(1), "aten.flip"),
    "median": (lambda m, x: x.median(1)[0], "aten.median.dim"),
    "topk": (lambda m, x: x.topk(2, 1)[0], "aten.topk"),
    "norm over tokens": (lambda m, x: F.group_norm(x.mT, 2), "normalizes over padding"),
    "a view across rows": (lambda m, x: x.mT.reshape(x.shape[0], -1).view(x.shape), "between the elements"),
    "average that counts no zeros": (lambda m, x: F.avg_pool1d(x.mT, 3, 1, 1, count_include_pad=False), "last windows"),
    "place in all": (lambda m, x: x.argmax(), "counts places among padding"),
    "causal across": (lambda m, x: F.scaled_dot_product_attention(x[:, 1:], x, x, is_causal=True), "is causal"),
    "write": (lambda m, x: x.index_add(1, torch.tensor([0]), x[:, :1]), "nothing is known"),
    "other places": (lambda m, x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1), "padding in different places"),
    "either end": (lambda m, x: m.table[x.shape[1] - x.shape[0] * 2 :], "some sizes and not for others"),
    "half an integer": (lambda m, x: F.pad((x * 9).int(), (0, 0, 1, 1), value=0.5), "int32 does not hold"),
    "beyond a byte": (lambda m, x: F.pad((x * 9).to(torch.int8), (0, 0, 1, 1), value=999.0), "int8 does not hold"),
    "up to a length": (lambda m, x: F.pad(x, (0, 0, 0, 100 - x.shape[1])), "its widths depend on sizes"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_proved_is_an_error(what, parts):
    function, told = REFUSED[what]
    program, shapes = exported(Model(function, **parts), x_of(3, 7), least=4)
    with pytest.raises(UnsupportedError, match=told) as error:
        run_poisoned(program, shapes, list(x_of(2, 5)), [3, 8])
    assert "lazy=True" in str(error.value)
