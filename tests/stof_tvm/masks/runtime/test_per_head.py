"""A rule for each head: the maps of each, evaluated together where they are the same."""

import copy
import pickle

import pytest
import torch

from stof_tvm import masks, sparse_attention
from tir_kernels.errors import MaskError

runtime = masks.runtime


def tensors(heads=4, kv_heads=2, length=200):
    torch.manual_seed(4)
    return torch.randn(2, heads, length, 16), torch.randn(2, kv_heads, length, 16)


def test_each_head_has_the_map_of_its_rule():
    q, k = tensors()
    rules = [runtime.xattention(8, 0.5), runtime.top_blocks(1), runtime.top_blocks(2), runtime.xattention(8, 0.5)]
    found = runtime.per_head(rules).block_map(q, k)
    for h, rule in enumerate(rules):
        assert torch.equal(found[:, h], rule.block_map(q, k)[:, h])
    assert not torch.equal(found[:, 1], runtime.top_blocks(2).block_map(q, k)[:, 1])


@pytest.mark.parametrize(
    "heads, seen",
    [
        ("aaaa", [("a", 4, 2)]),
        ("aabb", [("a", 2, 1), ("b", 2, 1)]),
        ("abab", [("a", 2, 2), ("b", 2, 2)]),
        ("abbb", [("a", 1, 1), ("b", 3, 3)]),
        ("-aa-", [("a", 2, 2)]),
    ],
)
def test_heads_of_a_rule_are_evaluated_together(heads, seen):
    calls = []

    def named(name):
        def function(q, k):
            calls.append((name, q.shape[1], k.shape[1]))
            return (q[:, :, ::64, :4] > 0) if name == "a" else torch.eye(4, dtype=torch.bool)[None, None]

        return runtime.rule(function)

    rules = {"a": named("a"), "b": named("b"), "-": masks.causal()}
    q, k = tensors()
    found = runtime.per_head([rules[name] for name in heads]).block_map(q, k)
    assert calls == seen and found.shape == (2, 4, 4, 4)
    for h, name in enumerate(heads):
        if name == "a":
            assert torch.equal(found[:, h], q[:, h, ::64, :4] > 0)
        elif name == "b":
            assert torch.equal(found[:, h], torch.eye(4, dtype=torch.bool).expand(2, -1, -1))
        else:
            assert found[:, h].all()


def test_functions_of_one_name_are_not_taken_for_one():
    def always(value):
        return runtime.rule(lambda q, k: torch.full((1, 1, 4, 4), value))

    assert repr(always(True)) == repr(always(False))
    found = runtime.per_head([always(True), always(False)]).block_map(*tensors(2, 1))
    assert found[:, 0].all() and not found[:, 1].any()


class Column:
    """Keeps one column of blocks; equal to any other."""

    def __init__(self, column):
        self.column = column

    def __call__(self, q, k):
        kept = torch.zeros(1, 1, -(-q.shape[2] // 64), -(-k.shape[2] // 64), dtype=torch.bool)
        kept[..., self.column] = True
        return kept

    def __eq__(self, other):
        return isinstance(other, Column)

    def __hash__(self):
        return 1


def test_a_copy_of_a_rule_is_another_one():
    """Whatever a function compares as; a rule that was saved has none of another's identity, wherever it lies."""
    q, k = tensors()
    first = runtime.rule(Column(0))
    copied, loaded = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    copied.function.column, loaded.function.column = 1, 2
    found = runtime.per_head([first, copied, loaded, first]).block_map(q, k)
    assert found[0, :, 0].nonzero()[:, 1].tolist() == [0, 1, 2, 0]
    both = [runtime.per_head([rule] * 4) for rule in (first, copied)]
    assert len({first.identity, copied.identity, loaded.identity, *(rule.identity for rule in both)}) == 5
    assert (first & masks.causal()).identity == first.identity


def test_static_masks_stay_those_of_their_heads():
    q, k = tensors()
    v = torch.randn(2, 2, 200, 16)
    some = runtime.top_blocks(2) & masks.sliding_window(90)
    rule = runtime.per_head([some, masks.a_shape(3, 20), runtime.xattention(8, 0.6), runtime.top_blocks(1)])
    bound = masks.global_tokens(1) | masks.sliding_window(150)
    rule = rule & bound
    keep = torch.stack(
        [
            (some.mask(q, k).dense(200))[:, 0],
            masks.a_shape(3, 20).dense(200).expand(2, -1, -1),
            runtime.xattention(8, 0.6).mask(q, k).dense(200)[:, 2],
            runtime.top_blocks(1).mask(q, k).dense(200)[:, 3],
        ],
        1,
    ) & bound.dense(200)
    assert torch.equal(rule.mask(q, k).dense(200), keep)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)
    out = sparse_attention(q, k, v, rule, enable_gqa=True)
    assert (out - torch.where(keep.any(-1, keepdim=True), expected, 0)).abs().max() < 1e-5
    assert repr(rule).endswith("top_blocks(1, block=64)]) & (global_tokens(1) | sliding_window(150))")


def test_heads_without_a_static_mask_have_none():
    assert runtime.per_head([runtime.top_blocks(1)] * 2).within is None


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: runtime.per_head([]), "needs at least one Rule"),
        (lambda: runtime.per_head([masks.causal()]), r"needs at least one Rule, got \[causal\(\)\]"),
        (lambda: runtime.per_head(runtime.top_blocks(1)), "needs a list of rules and masks, got top_blocks"),
        (lambda: runtime.per_head(3), "needs a list of rules and masks, got 3"),
        (lambda: runtime.per_head([runtime.top_blocks(1), 3]), "entry 1 must be a Rule or a Mask, got int"),
        (
            lambda: runtime.per_head([runtime.top_blocks(1), runtime.top_blocks(1, 32)]),
            r"rules of one block: top_blocks\(1, block=64\) has \(64, 64\), top_blocks\(1, block=32\) \(32, 32\)",
        ),
        (
            lambda: runtime.per_head([runtime.top_blocks(1), masks.per_head([masks.causal()] * 2)]),
            "entry 1, .* depends on the head already",
        ),
        (lambda: runtime.per_head([runtime.top_blocks(1)] * 3).block_map(*tensors()), "for 3 heads, q has 4"),
    ],
)
def test_refused(make, words):
    with pytest.raises(MaskError, match=words):
        make()
