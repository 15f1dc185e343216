"""Compilation: independent of chunks, within memory, cached within bounds."""

import tracemalloc

import numpy as np
import pytest
import torch

from stof_tvm import masks
from stof_tvm.masks import compilation
from stof_tvm.masks.walking import block_rows
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.errors import MaskError

MASKS = [
    masks.bigbird(5, 3, 0.3, block=24),
    masks.causal() & ~masks.dilated_window(4, 7),
    masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 == 0),
    masks.per_head([masks.document([50, 47]), masks.fixed(16, 2)]) & masks.padding([97, 60]),
]


@pytest.fixture
def fresh_cache(monkeypatch):
    cache = BoundedCache(compilation._size, compilation.CACHE_BYTES, compilation.CACHE_ENTRIES)
    monkeypatch.setattr(compilation, "_cache", cache)
    return cache


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_chunks_do_not_matter(mask, monkeypatch, fresh_cache):
    whole, dense = mask.compile(97, block=(8, 16)), mask.dense(97)
    for blocks, elements in [(1, 1), (30, 300)]:
        monkeypatch.setattr(block_rows, "CHUNK_BLOCKS", blocks)
        monkeypatch.setattr(compilation, "CHUNK_ELEMENTS", elements)
        fresh_cache.entries.clear()
        assert mask.compile(97, block=(8, 16)) == whole
        assert (mask.dense(97) == dense).all()


COARSE_MASKS = [
    *((mask, 97) for mask in MASKS),
    (masks.a_shape(4, 9), 113),
    (masks.causal() & ~masks.causal(), 113),
    (masks.causal() | masks.bigbird(5, 3, 0.3, block=16), 50),
    (masks.document([50, 47]) & masks.causal(), 97),
]


@pytest.mark.parametrize("mask, kv_len", COARSE_MASKS, ids=repr)
@pytest.mark.parametrize("block", [(8, 16), (16, 8), (24, 8), (128, 16), (8, 192)], ids=str)
def test_coarse_blocks_hold_the_same_mask(mask, kv_len, block, monkeypatch, fresh_cache):
    """Patterns of long sequences are asked for coarse blocks first; here those of short ones, in chunks and at once."""
    whole = mask.compile(97, kv_len, block=block)
    monkeypatch.setattr(block_rows, "FEWEST_COARSE", 1)
    for coarse, together, chunk, partial in [(16, 2, 16, 1), (16, 1, 1 << 19, 1), (32, 2, 4, 1), (16, 3, 64, 0.2)]:
        monkeypatch.setattr(block_rows, "COARSE", coarse)
        monkeypatch.setattr(block_rows, "COARSE_TOGETHER", together)
        monkeypatch.setattr(block_rows, "CHUNK_BLOCKS", chunk)
        monkeypatch.setattr(block_rows, "MOST_PARTIAL", partial)
        fresh_cache.entries.clear()
        assert mask.compile(97, kv_len, block=block).validate() == whole


def test_coarse_blocks_are_taken_where_few_are_partial(monkeypatch):
    """Not where a formula tells nothing of blocks, and all of their elements would be looked at by coarse ones."""
    taken, coarsely = [], block_rows._coarsely
    monkeypatch.setattr(block_rows, "_coarsely", lambda *a: taken.append(coarsely(*a)) or taken[-1])
    formula = masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx * kv_idx) % 7 == 0)
    for mask in (masks.sliding_window(64), masks.sliding_window(64) & formula):
        lists = list(block_rows.walk(mask.bind(1 << 15, 1 << 15), 1 << 15, 1 << 15, (16, 32), 1))
        assert taken and None not in taken
        assert sum(len(some.part_count) for some in lists) == (1 << 15) // 16
        taken.clear()
    pattern = formula.bind(1 << 15, 1 << 15)
    first = next(block_rows.walk(pattern, 1 << 15, 1 << 15, (16, 32), 1))
    assert taken == [None] and len(first.part_count) == 512  # of 2,048 block rows: 2^19 blocks at once


@pytest.mark.parametrize(
    "mask, share, most_in_a_row",
    [(masks.sliding_window(64), 1 / 20, 7), (masks.bigbird(128, 64, 0.002), 1 / 7, 8192 / 200)],
    ids=repr,
)
def test_long_sequences_are_asked_for_few_blocks(mask, share, most_in_a_row):
    """16,384 block rows of 8,192 blocks: some 6 s, if every block were asked for."""
    asked = []
    pattern = mask.bind(1 << 18, 1 << 18)
    blocks = pattern.blocks
    pattern.blocks = lambda i0, i1, j0, j1, stride: asked.append(len(i0) * len(j0)) or blocks(i0, i1, j0, j1, stride)
    lists = list(block_rows.walk(pattern, 1 << 18, 1 << 18, (16, 32), 1))
    assert sum(asked) < 16384 * 8192 * share
    listed = sum(len(some.full_col) + len(some.part_col) for some in lists)
    assert 16384 * 4 < listed < 16384 * most_in_a_row


@pytest.mark.parametrize(
    "mask, block",
    [
        (masks.bigbird(), (64, 64)),
        (masks.bigbird(), (32, 128)),
        (masks.causal() & masks.sliding_window(1024), (64, 64)),
        (masks.longformer() | masks.a_shape(4, 100), (128, 64)),
        (masks.document([4096, 20000, 8672]), (64, 64)),
    ],
    ids=repr,
)
def test_no_quadratic_memory(mask, block, fresh_cache):
    """At 32,768 a dense boolean mask takes 1 GiB."""
    tracemalloc.start()
    compiled = mask.compile(32768, block=block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not compiled.is_empty
    assert peak < 200e6


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.sliding_window(20),
        masks.dilated_window(3, 40),
        masks.global_tokens([3, 100]),
        masks.document([40, 30, 0, 130, 3]),
        masks.padding([111]),
        masks.block_sparse(np.tri(9, 9, dtype=bool), 23),
        masks.bigbird(0, 0, 0.4, block=48) & masks.global_tokens(64),
        ~masks.causal("bottom-right"),
    ],
    ids=repr,
)
def test_only_part_blocks_are_looked_at(mask, monkeypatch, fresh_cache):
    """Whole blocks are decided from index intervals: their elements are never evaluated."""
    looked_at = []
    bits = block_rows._bits
    monkeypatch.setattr(block_rows, "_bits", lambda *a: looked_at.append(bits(*a)) or looked_at[-1])
    compiled = mask.compile(203, block=(16, 8))
    assert sum(map(len, looked_at)) == len(compiled.part_col_idx) > 0


STRIDED = [
    masks.strided(11),
    masks.dilated_window(5, 3) | masks.global_tokens(4),
    masks.bigbird(block=16),
    masks.longformer(9, [3, 60]) & masks.causal(),
    masks.fixed(16, 2),
    ~masks.sliding_window(3),
    masks.per_head([masks.strided(7), masks.from_mask_mod(lambda b, h, i, j: (i * j) % 5 == 0)]),
]


@pytest.mark.parametrize("mask", STRIDED, ids=repr)
@pytest.mark.parametrize("block, stride", [((16, 32), 3), ((128, 64), 11), ((64, 128), 2), ((64, 64), 40)])
def test_blocks_of_tokens_apart_hold_the_same_mask(mask, block, stride):
    compiled = mask.compile(103, 120, block, token_stride=stride).validate()
    dense = mask.dense(103, 120).numpy()
    np.testing.assert_array_equal(compiled.to_dense(), dense.reshape((1,) * (4 - dense.ndim) + dense.shape))


def test_blocks_of_every_stride_th_token_are_few_and_decided_exactly(monkeypatch, fresh_cache):
    looked_at, mask = [], masks.strided(16)
    bits = block_rows._bits
    monkeypatch.setattr(block_rows, "_bits", lambda *a: looked_at.append(bits(*a)) or looked_at[-1])
    compiled = mask.split(15)[1].compile(512, block=(16, 16), token_stride=16)
    assert sum(map(len, looked_at)) == len(compiled.part_col_idx)
    assert len(compiled.load_col_idx) < 0.2 * len(mask.split(15)[1].compile(512, block=(16, 16)).load_col_idx)


def test_split_by_distance_is_disjoint_and_whole():
    mask = masks.strided(6) | masks.global_tokens(2)
    near, far = (part.dense(40, 50) for part in mask.split(5))
    assert not (near & far).any() and ((near | far) == mask.dense(40, 50)).all()
    i, j = torch.arange(40)[:, None], torch.arange(50)
    assert not near[(i - j).abs() > 5].any() and not far[(i - j).abs() <= 5].any()


def test_token_stride_must_be_a_positive_integer():
    for stride in (0, -1, 1.5, True):
        with pytest.raises(MaskError, match="token_stride"):
            masks.causal().compile(16, token_stride=stride)


def test_heads_that_share_a_mask_are_evaluated_once(fresh_cache):
    calls = []

    def mod(b, h, q_idx, kv_idx):
        calls.append(1)
        return q_idx >= kv_idx

    shared = masks.per_head([masks.from_mask_mod(mod)] * 12)
    assert shared.dense(40).shape == (1, 12, 40, 40) and len(calls) == 1
    assert shared.compile(40).n_patterns == 1 and len(calls) == 2


def test_equal_masks_share_what_is_compiled(fresh_cache):
    first = (masks.causal() & masks.sliding_window(5)).compile(64)
    assert (masks.causal() & masks.sliding_window(5)).compile(64, 64, block=(64, 64)) is first
    assert (masks.causal() & masks.sliding_window(5)).compile(64, block=(32, 64)) is not first


def test_cache_is_bounded(monkeypatch, fresh_cache):
    size = compilation._size(masks.sliding_window(5).compile(512))
    monkeypatch.setattr(fresh_cache, "most_bytes", 4 * size)
    for window in range(6, 40):
        masks.sliding_window(window).compile(512)
    assert fresh_cache.bytes == sum(map(compilation._size, fresh_cache.entries.values())) <= 4 * size
    kept = [key[0] for key in fresh_cache.entries]
    latest = [masks.sliding_window(window).identity for window in range(40 - len(kept), 40)]
    assert kept and kept == latest, "the latest stay"


def test_cache_drops_the_least_recently_used(monkeypatch, fresh_cache):
    used, unused, new = (masks.sliding_window(window) for window in (5, 6, 7))
    kept = used.compile(512)
    unused.compile(512)
    used.compile(512)
    monkeypatch.setattr(fresh_cache, "most_bytes", fresh_cache.bytes)
    new.compile(512)
    assert used.compile(512) is kept
    assert [key[0] for key in fresh_cache.entries] == [new.identity, used.identity]


def test_what_exceeds_the_cache_still_compiles(monkeypatch, fresh_cache):
    monkeypatch.setattr(fresh_cache, "most_bytes", 10)
    assert masks.causal().compile(100).density == pytest.approx(101 / 200)
    assert not fresh_cache.entries and fresh_cache.bytes == 0


def test_a_mask_that_keeps_nothing_compiles_and_says_so():
    nothing = masks.causal() & ~masks.causal()
    compiled = nothing.compile(97, block=(16, 16)).validate()
    assert compiled.is_empty and compiled.density == 0 == nothing.density(97)
    assert not masks.causal().compile(97).is_empty


@pytest.mark.parametrize(
    "block, message",
    [((8, 12), "block width 12 must be a positive multiple of 8"), (64, "must be a pair"), ((0, 8), "block height 0")],
)
def test_block_sizes(block, message):
    with pytest.raises(MaskError, match=message):
        masks.causal().compile(64, block=block)


def test_kv_len_defaults_to_q_len():
    assert masks.causal().dense(9).shape == (9, 9)
    assert masks.causal().compile(9) is masks.causal().compile(9, 9)
