"""Attention with a rule in sections of rows: the results of all rows at once, and bounded memory."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import MaskError
from stof_tvm.given_masks import NO_MASK, given_mask
from stof_tvm.launches import planned, sections
from stof_tvm.masks.runtime.rule import Rule

runtime = masks.runtime
LENGTH, HEADS, DIM = 200, 4, 16


def qkv(length=LENGTH, kv_heads=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS, kv_heads, kv_heads
    return [torch.randn(batch, n, length, DIM, generator=generator) for n in heads]


@pytest.fixture
def cut(monkeypatch):
    """The calls of sections, of 64 rows each."""
    seen = []
    attend = sections.in_sections

    def note(attend_rows, of_no_keys, q, bias, maps, block, given, rows):
        seen.append(rows)
        return attend(attend_rows, of_no_keys, q, bias, maps, block, given, 64)

    monkeypatch.setattr(sections, "LARGE", 0)
    monkeypatch.setattr(sections, "SHARE", 0)
    monkeypatch.setattr("stof_tvm.attention.in_sections", note)
    return seen


RULES = {
    "vertical_slash": runtime.vertical_slash(12, 40, last=16, sinks=4, window=8, block=(16, 32)),
    "top blocks": runtime.top_blocks(2, block=32),
    "top blocks, causal": runtime.top_blocks(2, block=32, causal=True),
    "bounds": runtime.top_blocks(2, block=32, pool="bounds"),
    "mass": runtime.xattention(4, 0.7, block=32),
    "within a window": runtime.top_blocks(3, block=32) & masks.sliding_window(50),
    "within a mask for each head": runtime.top_blocks(3, block=32)
    & masks.per_head([masks.causal(), masks.sliding_window(9), ~masks.sliding_window(40), masks.causal()]),
    "a rule for each head": runtime.per_head(
        [
            runtime.top_blocks(2, block=32, causal=True),
            masks.sliding_window(20),
            runtime.vertical_slash(6, 20, last=8, sinks=2, window=4, block=32),
            runtime.top_blocks(2, block=32, causal=True),
        ]
    ),
    "one map for all heads": runtime.rule(
        lambda q, k: (torch.arange(-(-q.shape[2] // 32))[:, None] >= torch.arange(-(-k.shape[2] // 32)))[None, None],
        block=32,
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("length", [128, 200])
def test_results_are_those_of_all_rows_at_once(rule, length, request):
    q, k, v = qkv(length)
    bias, sink = torch.randn(1, HEADS, length, length), torch.randn(HEADS)
    options = {"enable_gqa": True, "bias": bias, "sink": sink, "return_lse": True}
    expected = stof_tvm.sparse_attention(q, k, v, rule, **options)
    seen = request.getfixturevalue("cut")
    found = stof_tvm.sparse_attention(q, k, v, rule, **options)
    assert len(seen) == 1
    for one, other in zip(found, expected):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_a_scale_a_bias_of_one_row_and_other_strides(request):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    k = k.mT.contiguous().mT
    options = {"enable_gqa": True, "bias": torch.randn(1, 1, 1, LENGTH), "scale": 0.7, "softcap": 3.0}
    rule = RULES["within a window"]
    expected = stof_tvm.sparse_attention(q, k, v, rule, **options)
    request.getfixturevalue("cut")
    torch.testing.assert_close(stof_tvm.sparse_attention(q, k, v, rule, **options), expected)


def test_rows_that_keep_nothing(request):
    """The static mask of whole sections, even of the last, is empty."""
    rows = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    rows[70:100, :90] = True
    rule, sink = runtime.top_blocks(3, block=32) & masks.from_tensor(rows), torch.randn(HEADS)
    expected = stof_tvm.sparse_attention(*qkv(), rule, enable_gqa=True, sink=sink, return_lse=True)
    request.getfixturevalue("cut")
    found = stof_tvm.sparse_attention(*qkv(), rule, enable_gqa=True, sink=sink, return_lse=True)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    nothing = runtime.top_blocks(3, block=32) & masks.from_tensor(torch.zeros_like(rows))
    with pytest.raises(MaskError, match="keeps nothing at \\(200, 200\\)"):
        stof_tvm.sparse_attention(*qkv(), nothing, enable_gqa=True)


def test_nothing_is_planned_again(cut):
    planned.plans.clear(), planned.choices.clear()
    rule = RULES["top blocks, causal"]
    first = stof_tvm.sparse_attention(*qkv(), rule, enable_gqa=True)
    known = dict(planned.plans.entries), dict(planned.choices.entries)
    assert len(known[0]) == 4 and len(known[1]) == 2  # sections of 64 rows and one of 8
    assert torch.equal(stof_tvm.sparse_attention(*qkv(), rule, enable_gqa=True), first)
    assert (planned.plans.entries, planned.choices.entries) == known


class InRows:
    def __init__(self, whole, rows):
        self.whole, self.rows = whole, rows

    def __call__(self, q, k):
        return self.whole

    def in_rows(self, q, k):
        return self.rows


def test_rows_of_a_users_rule(cut):
    """Only rows are asked for, and they are checked as a map is."""
    q, k, v = qkv()
    whole = torch.rand(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    asked = []
    rows = lambda first, end: asked.append((first, end)) or whole[:, :, first:end]
    rule = runtime.rule(InRows(None, rows), block=32)
    out = stof_tvm.sparse_attention(q, k, v, rule, enable_gqa=True)
    assert asked == [(0, 2), (2, 4), (4, 6), (6, 7)]
    torch.testing.assert_close(out, stof_tvm.sparse_attention(q, k, v, masks.block_sparse(whole, 32), enable_gqa=True))
    with pytest.raises(MaskError, match="map of shape .* for the rows of blocks 0 to 1; .* \\(B or 1, H or 1, 2, 7\\)"):
        stof_tvm.sparse_attention(q, k, v, runtime.rule(InRows(None, lambda *_: whole), block=32), enable_gqa=True)

    def writes(first, end):
        q.mul_(2)
        return whole[:, :, first:end]

    with pytest.raises(MaskError, match="writes into q or k"):
        stof_tvm.sparse_attention(q, k, v, runtime.rule(InRows(None, writes), block=32), enable_gqa=True)


def sized(heads, kv_heads, length, dim, kv_length=None):
    """Tensors without memory."""
    shape = lambda n, length: torch.empty(1, n, length, dim, dtype=torch.bfloat16, device="meta")
    return shape(heads, length), *(shape(kv_heads, kv_length or length) for _ in "kv")


@pytest.mark.parametrize("length", [1 << 20, 1 << 21, 1_000_000, 1 << 22])
def test_a_section_of_a_million_tokens_takes_a_small_share(length):
    q, k, v = sized(4, 1, length, 128)
    given = given_mask(masks.causal(), (1, 4, length, length))
    rows = sections.section_rows(q, k, v, (128, 128), given)
    assert rows % 128 == 0 and -(-length // rows) <= 2 * sections.MOST
    map_and_lists = 4 * (rows // 128) * -(-length // 128) * 9
    assert map_and_lists <= 0.05 * (2 * q.nbytes + k.nbytes + v.nbytes)
    if length <= 1 << 20:
        assert map_and_lists <= 0.021 * (2 * q.nbytes + k.nbytes + v.nbytes)


@pytest.mark.parametrize(
    ("q", "k", "v", "block", "given"),
    [
        (*sized(32, 8, 131072, 128), (64, 64), given_mask(masks.causal(), (1, 32, 131072, 131072))),
        (*sized(7, 7, 109632, 128), (64, 64), NO_MASK),
        (*sized(4, 1, 1024, 32), (128, 128), NO_MASK),
        (*sized(4, 1, 1 << 19, 128, 1 << 20), (128, 128), given_mask(masks.causal(), (1, 4, 1 << 19, 1 << 20))),
    ],
    ids=["131072", "109632", "short", "not square"],
)
def test_shorter_inputs_are_computed_at_once(q, k, v, block, given):
    assert sections.section_rows(q, k, v, block, given) is None


def test_a_rule_without_rows_gives_parts_of_its_whole_map():
    q, k, _ = qkv()
    rule = RULES["mass"]
    assert isinstance(rule, Rule) and not hasattr(rule.function, "in_rows")
    assert torch.equal(rule.maps_of_rows(q, k)(2, 5), rule.block_map(q, k)[:, :, 2:5])


@pytest.mark.parametrize("name", ["vertical_slash", "top blocks", "top blocks, causal", "a rule for each head"])
def test_rows_are_those_of_the_whole_map(name):
    q, k, _ = qkv()
    rule = RULES[name]
    assert hasattr(rule.function, "in_rows")
    rows, whole = rule.maps_of_rows(q, k), rule.block_map(q, k)
    n = whole.shape[2]
    assert torch.equal(torch.cat([rows(0, 1), rows(1, n - 1), rows(n - 1, n)], 2), whole)
