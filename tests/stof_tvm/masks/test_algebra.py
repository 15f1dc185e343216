"""&, |, ~ and per_head: what they keep, their shapes, their equality and how they print."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from stof_tvm import masks
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask

Q_LEN, KV_LEN = 53, 70

SIMPLE = st.one_of(
    st.sampled_from(["top-left", "bottom-right"]).map(masks.causal),
    st.builds(masks.sliding_window, st.integers(0, 60), st.booleans()),
    st.builds(masks.dilated_window, st.integers(0, 6), st.integers(1, 9)),
    st.builds(masks.global_tokens, st.integers(0, 70)),
    st.builds(masks.global_tokens, st.sets(st.integers(0, 52), max_size=4)),
    st.builds(masks.bigbird, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.integers(1, 40)),
    st.builds(masks.strided, st.integers(1, 40)),
    st.integers(1, 40).flatmap(lambda n: st.builds(masks.fixed, st.just(n), st.integers(0, n))),
    st.builds(masks.prefix_lm, st.integers(0, 80)),
    st.builds(masks.vertical_slash, st.sets(st.integers(0, 69), max_size=5), st.sets(st.integers(0, 52), max_size=5)),
    st.lists(st.integers(0, 70), min_size=1, max_size=1).map(masks.padding),
    st.integers(0, 99).map(lambda seed: masks.from_tensor(np.random.default_rng(seed).random((Q_LEN, KV_LEN)) < 0.9)),
)
COMPOSED = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(COMPOSED, st.sampled_from([(8, 8), (16, 8), (8, 32), (64, 64)]))
def test_compile_is_from_dense_of_dense(mask, block):
    compiled = mask.compile(Q_LEN, KV_LEN, block)
    assert compiled == BlockSparseMask.from_dense(mask.dense(Q_LEN, KV_LEN).numpy(), block), mask
    compiled.validate()


@settings(max_examples=50, deadline=None)
@given(COMPOSED, COMPOSED)
def test_operators_are_elementwise(a, b):
    dense_a, dense_b = a.dense(Q_LEN, KV_LEN), b.dense(Q_LEN, KV_LEN)
    assert torch.equal((a & b).dense(Q_LEN, KV_LEN), dense_a & dense_b)
    assert torch.equal((a | b).dense(Q_LEN, KV_LEN), dense_a | dense_b)
    assert torch.equal((~a).dense(Q_LEN, KV_LEN), ~dense_a)


@settings(max_examples=30, deadline=None)
@given(st.lists(COMPOSED, min_size=2, max_size=3), st.lists(st.integers(0, KV_LEN), min_size=2, max_size=3))
def test_heads_and_batches_compile_as_from_dense(per_head_masks, lengths):
    mask = masks.per_head(per_head_masks) & masks.padding(lengths)
    dense = mask.dense(Q_LEN, KV_LEN)
    assert dense.shape == (len(lengths), len(per_head_masks), Q_LEN, KV_LEN)
    assert mask.compile(Q_LEN, KV_LEN, (16, 16)) == BlockSparseMask.from_dense(dense.numpy(), (16, 16))


def test_per_head_gives_each_head_its_mask():
    parts = [masks.causal(), masks.sliding_window(5), masks.causal()]
    mask = masks.per_head(parts)
    assert (mask.batch, mask.heads) == (None, 3)
    dense = mask.dense(40, 30)
    assert dense.shape == (1, 3, 40, 30)
    for h, part in enumerate(parts):
        assert torch.equal(dense[0, h], part.dense(40, 30))
    compiled = mask.compile(40, 30, (8, 8))
    assert compiled.n_patterns == 2 and compiled.head_to_mask.tolist() == [[0, 1, 0]]


def test_per_head_of_batched_masks_and_composition_with_batches():
    mask = masks.per_head([masks.padding([3, 9]), masks.causal()]) | ~masks.padding([8, 9])
    assert (mask.batch, mask.heads) == (2, 2)
    for b, (kept, padded) in enumerate([(3, 8), (9, 9)]):
        for i, j in np.ndindex(9, 9):
            assert mask.dense(9)[b, 0, i, j] == (j < kept or j >= padded)
            assert mask.dense(9)[b, 1, i, j] == (j <= i or j >= padded)


def test_masks_spelled_differently_share_a_pattern():
    mask = masks.per_head([masks.causal(), ~~masks.causal(), masks.prefix_lm(0), masks.strided(1), masks.prefix_lm(9)])
    assert mask.compile(64, block=(16, 16)).head_to_mask.tolist() == [[0, 0, 0, 0, 1]]


def test_equal_masks_are_equal_and_hash_alike():
    def make():
        causal_window = masks.sliding_window(3) & masks.causal()
        return masks.per_head([causal_window | ~masks.bigbird(), masks.padding([1, 2])])

    assert make() == make() and hash(make()) == hash(make())
    assert len({make(), make(), masks.causal(), masks.causal("top-left")}) == 2
    assert masks.causal() != masks.causal("bottom-right")
    assert (masks.causal() & masks.strided(3)) != (masks.causal() | masks.strided(3))
    assert ~masks.causal() != masks.causal() and ~~masks.causal() == masks.causal()
    assert masks.causal() != "causal()"


def test_repr_reads_as_the_call():
    assert repr(masks.longformer(window=32, global_tokens=32) & masks.causal()) == (
        "longformer(window=32, global_tokens=32) & causal()"
    )
    assert repr(masks.causal("bottom-right")) == "causal(align='bottom-right')"
    assert repr(masks.bigbird()) == "bigbird()" and repr(masks.bigbird(seed=3)) == "bigbird(seed=3)"
    a, b, c = masks.causal(), masks.strided(2), masks.sliding_window(1, causal=True)
    assert repr(a & b & c) == "causal() & strided(2) & sliding_window(1, causal=True)"
    assert repr((a | b) & ~(b & c)) == "(causal() | strided(2)) & ~(strided(2) & sliding_window(1, causal=True))"
    assert repr(masks.per_head([a, ~b])) == "per_head([causal(), ~strided(2)])"
    assert repr(masks.padding([3, 4])) == "padding((3, 4))"
    assert len(repr(masks.document([1] * 5000))) < 60
    for mask in (a & b, (a | b) & ~(b & c), a | (b | c), masks.per_head([a, ~b]), masks.bigbird(3, [1, 5], 0.5)):
        assert eval(repr(mask), vars(masks)) == mask


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: masks.per_head([]), "per_head needs at least one mask"),
        (lambda: masks.per_head([masks.causal(), 3]), "per_head entry 1 must be a Mask, got int"),
        (
            lambda: masks.per_head([masks.per_head([masks.causal(), masks.strided(2)])]),
            "per_head entry 0, .* depends on the head already",
        ),
        (lambda: masks.padding([1, 2]) & masks.padding([1, 2, 3]), "masks for 2 and 3 batch entries do not combine"),
        (
            lambda: masks.per_head([masks.causal()] * 2) | masks.per_head([masks.causal()] * 4),
            "masks for 2 and 4 heads do not combine",
        ),
        (lambda: masks.causal() and masks.strided(2), "has no truth value; combine masks by &"),
        (lambda: not masks.causal(), "has no truth value"),
    ],
)
def test_refused(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def near(b, h, i, j):
    return (i - j).abs() <= 5


OPERANDS = {
    "a tensor": masks.sliding_window(5).dense(Q_LEN),
    "a tensor of heads": masks.sliding_window(5).dense(Q_LEN).expand(1, 3, -1, -1),
    "keys": torch.arange(Q_LEN) < 9,
    "an array": masks.sliding_window(5).dense(Q_LEN).numpy(),
    "a function": near,
    "a BlockMask": create_block_mask(near, None, None, Q_LEN, Q_LEN, device="cpu", BLOCK_SIZE=16),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_what_build_takes_for_a_mask_is_an_operand(name):
    given, mask = OPERANDS[name], masks.causal()
    expected = torch.arange(Q_LEN) < 9 if name == "keys" else masks.sliding_window(5).dense(Q_LEN)
    for joined in (mask & given, given & mask):
        assert torch.equal(
            joined.dense(Q_LEN).squeeze(), (mask.dense(Q_LEN) & expected).expand_as(joined.dense(Q_LEN).squeeze())
        )
    for joined in (mask | given, given | mask):
        assert torch.equal(
            joined.dense(Q_LEN).squeeze(), (mask.dense(Q_LEN) | expected).expand_as(joined.dense(Q_LEN).squeeze())
        )


def fails(b, h, i, j):
    return i.item() > j


@pytest.mark.parametrize(
    "given, message",
    [
        (masks.causal, r"call it: masks.causal\(\)"),
        (masks.sliding_window, r"call it: masks.sliding_window\(…\)"),
        (torch.ones(Q_LEN, Q_LEN, dtype=torch.int64), r"got torch.int64: one of 1 \(kept\) and 0.*mask.bool\(\)"),
        (torch.ones(Q_LEN, Q_LEN), r"got torch.float32: one of 1 \(kept\) and 0.*mask.bool\(\)"),
        (np.ones((Q_LEN, Q_LEN), int), r"mask.astype\(bool\)"),
        (lambda b, h, i, j: i - j < h, r"depends on h; .*from_mask_mod\(<lambda>, heads=…\)"),
        (lambda b, h, i, j: i - j < b, r"depends on b; .*from_mask_mod\(<lambda>, batch=…\)"),
        (fails, r"mask_mod fails failed: RuntimeError: vmap: .*with other operations\.$"),
    ],
)
def test_operands_that_are_no_mask_yet(given, message):
    for join in (lambda: masks.causal() & given, lambda: given & masks.causal(), lambda: masks.causal() | given):
        with pytest.raises(MaskError, match=message):
            join()


@pytest.mark.parametrize("given", [masks.causal(), 3, None, masks.causal])
def test_per_head_takes_a_list(given):
    with pytest.raises(MaskError, match="per_head needs a list of masks, one for each head, got"):
        masks.per_head(given)


def test_other_operands_are_type_errors():
    with pytest.raises(TypeError):
        masks.causal() & 3
    with pytest.raises(TypeError):
        masks.causal() | None
