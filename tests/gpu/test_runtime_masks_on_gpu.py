"""Rules on a GPU: attention under what they find, against float32; captured once and replayed with other inputs."""

import math
from importlib import import_module

import pytest
import torch

from stof_tvm import masks, sparse_attention
from stof_tvm.masks.runtime import last_queries
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.runtime.selection import largest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
runtime = masks.runtime


def every_third(q, k):
    """A rule of one's own: blocks whose numbers add up to a multiple of three, none in the second row of blocks."""
    rows, columns = (torch.arange(-(-x.shape[2] // 128), device=q.device) for x in (q, k))
    found = (rows[:, None] + columns) % 3 == 0
    return (found & (rows != 1)[:, None])[None, None]


RULES = {
    "top_blocks": runtime.top_blocks(3, block=64),
    "top_blocks, causal, wide": runtime.top_blocks(2, block=(64, 128), causal=True),
    "vertical_slash": runtime.vertical_slash(20, 30, sinks=4, window=20, block=128),
    "narrow blocks": runtime.top_blocks(9, block=(128, 32)),
    "narrow blocks, causal": runtime.top_blocks(5, block=(64, 32), causal=True),
    "vertical_slash, narrow": runtime.vertical_slash(20, 30, sinks=4, window=20, block=(128, 32)),
    "vertical_slash, halves": runtime.vertical_slash(20, 30, sinks=4, window=20, block=(128, 64)),
    "vertical_slash, tall": runtime.vertical_slash(40, 200, sinks=30, window=100, block=(128, 32)),
    "xattention": runtime.xattention(stride=16, mass=0.7, block=128),
    "own": runtime.rule(every_third, block=128),
    "own, within a window": runtime.rule(every_third, block=128) & masks.sliding_window(100),
    "small blocks": runtime.top_blocks(4, block=(16, 32)),
    "flex_prefill": runtime.flex_prefill(0.7, 0.3, least=100, block=64),
    "sparge": runtime.sparge(0.6, 0.035, block=64, causal=True),
    "flash_prefill": runtime.flash_prefill(0.7, 1, 1, 1, block=128),
    "low_rank": runtime.low_rank(k=2, block=64),
}
SHAPES = {"grouped": (1, 8, 2, 700, 128), "batch": (2, 4, 4, 384, 64), "long row": (1, 1, 1, 5000, 128)}


def tensors(shape, dtype, seed=0):
    batch, heads, kv_heads, length, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    return tuple(
        torch.randn(batch, n, length, dim, device="cuda", dtype=dtype, generator=generator)
        for n in (heads, kv_heads, kv_heads)
    )


def expected(rule: Rule, q, k, v):
    """Float32 attention of what the rule keeps, and the error of q's own precision."""
    found = rule.block_map(q, k).expand(q.shape[0], q.shape[1], -1, -1)
    keep = found.repeat_interleave(rule.block[0], 2).repeat_interleave(rule.block[1], 3)
    keep = keep[:, :, : q.shape[2], : k.shape[2]]
    if rule.within is not None:
        keep = keep & rule.within.dense(q.shape[2], k.shape[2]).cuda()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    exact, half = (attention(*(x.to(dtype) for x in (q, k, v)), keep) for dtype in (torch.float32, q.dtype))
    return exact, max(float((half.float() - exact).abs().max()), torch.finfo(q.dtype).eps)


def attention(q, k, v, keep):
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~keep, -math.inf)
    return torch.softmax(scores, dim=-1).nan_to_num(0) @ v


@pytest.mark.parametrize("kernel", [None, "block-wise"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_attention_under_a_rule(name, shape, kernel):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = tensors(SHAPES[shape], dtype)
        out = sparse_attention(q, k, v, RULES[name], enable_gqa=True, kernel=kernel)
        exact, half_error = expected(RULES[name], q, k, v)
        assert float((out.float() - exact).abs().max()) <= 2 * half_error


@pytest.mark.parametrize("n", [7, 256, 1713, 20001])
def test_the_largest(n):
    scores = torch.randn(700, n, device="cuda")
    scores[:, ::3] = -torch.inf
    for k in (1, n // 4, n):
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
        expected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & (scores != -torch.inf)
        assert torch.equal(largest(scores, k), expected)


@pytest.mark.parametrize("length, last", [(700, 64), (20000, 64), (131072, 64), (129, 129), (5001, 1), (4096, 100)])
def test_the_last_queries_weights(length, last):
    """Against PyTorch in float64, a head at a time; NaN in a head that has it, and in no other."""
    q, k, _ = tensors((1, 8, 2, length, 64), torch.bfloat16)
    k[:, 1, length // 2] = torch.nan
    found = last_queries.sums_of_last(q, k, last)
    again = last_queries.sums_of_last(q, k, last)
    assert all(torch.equal(x[:, :4], y[:, :4]) for x, y in zip(found, again))
    assert all(bool(x[:, 4:].isnan().any(-1).all()) for x in found)
    place = torch.arange(length - last, length, device="cuda")[:, None]
    distance = place - torch.arange(length, device="cuda")
    for head in range(4):
        scores = (q[0, head, -last:].double() @ k[0, 0].double().T) / 8
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[0][0, head].double(), weights.sum(0), rtol=1e-4, atol=1e-7)
        by_distance = torch.zeros(length, dtype=torch.float64, device="cuda")
        by_distance.index_add_(0, distance.clamp(min=0).flatten(), weights.flatten())
        torch.testing.assert_close(found[1][0, head].double(), by_distance, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("block", [128, (128, 32), (64, 128), (16, 32), (48, 32), (16, 8192)])
@pytest.mark.parametrize("length", [128, 700, 8192, 20011])
def test_the_map_of_vertical_and_slash_positions_is_that_of_operators(length, block, monkeypatch):
    q, k, _ = tensors((2, 8, 2, length, 64), torch.bfloat16)
    for counts in ((40, 300), (0, 0), (3000, 6000)):
        rule = runtime.vertical_slash(*counts, block=block)
        found, some = rule.block_map(q, k), rule.maps_of_rows(q, k)
        rows = found.shape[2]
        assert all(torch.equal(some(at, rows), found[:, :, at:]) for at in {0, rows // 2, rows - 1})
        with monkeypatch.context() as changed:
            # By the name in its package the rule is found, not its module.
            changed.setattr(import_module("stof_tvm.masks.runtime.vertical_slash"), "takes", lambda block: False)
            assert torch.equal(rule.block_map(q, k), found)


def test_float32():
    q, k, v = tensors(SHAPES["grouped"], torch.float32)
    out = sparse_attention(q, k, v, RULES["own"], enable_gqa=True)
    assert float((out - expected(RULES["own"], q, k, v)[0]).abs().max()) <= 1e-5


def test_log_sum_exp_and_sink():
    rule, (q, k, v) = RULES["own"], tensors(SHAPES["grouped"], torch.bfloat16)
    sink = torch.randn(8, device="cuda")
    out, lse = sparse_attention(q, k, v, rule, enable_gqa=True, sink=sink, return_lse=True)
    assert torch.equal(lse[:, :, 128:256], sink[None, :, None].expand(1, 8, 128))
    assert bool((out[:, :, 128:256] == 0).all()) and bool(out.isfinite().all())


@pytest.mark.parametrize("kernel", ["warp-specialized", "block-wise"])
@pytest.mark.parametrize(
    "name", ["top_blocks", "vertical_slash", "xattention", "flex_prefill", "sparge", "flash_prefill", "low_rank"]
)
def test_a_captured_call_finds_other_blocks_in_each_replay(name, kernel):
    rule, shape = RULES[name], SHAPES["grouped"]
    q, k, v = tensors(shape, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse_attention(q, k, v, rule, enable_gqa=True, kernel=kernel)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(q, k, v, rule, enable_gqa=True, kernel=kernel)
    found = []
    for seed in range(3):
        for given, fresh in zip((q, k, v), tensors(shape, torch.bfloat16, seed)):
            given.copy_(fresh)
        for _ in range(2):  # the second finds the workspace as the first left it
            out.fill_(math.nan)
            graph.replay()
            exact, half_error = expected(rule, q, k, v)
            assert float((out.float() - exact).abs().max()) <= 2 * half_error
        found.append(rule.block_map(q, k))
    assert name not in ("top_blocks", "xattention", "low_rank") or not torch.equal(found[0], found[1])
