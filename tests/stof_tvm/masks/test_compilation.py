"""Compilation: independent of chunks, within memory, cached within bounds."""

import tracemalloc

import pytest

from stof_tvm import masks
from stof_tvm.masks import compilation
from tir_kernels.errors import MaskError

MASKS = [
    masks.bigbird(5, 3, 0.3, block=24),
    masks.causal() & ~masks.dilated_window(4, 7),
    masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 == 0),
    masks.per_head([masks.document([50, 47]), masks.fixed(16, 2)]) & masks.padding([97, 60]),
]


@pytest.fixture
def fresh_cache(monkeypatch):
    cache = compilation._Cache()
    monkeypatch.setattr(compilation, "_cache", cache)
    return cache


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_chunks_do_not_matter(mask, monkeypatch, fresh_cache):
    whole, dense = mask.compile(97, block=(8, 16)), mask.dense(97)
    for blocks, elements in [(1, 1), (30, 300)]:
        monkeypatch.setattr(compilation, "CHUNK_BLOCKS", blocks)
        monkeypatch.setattr(compilation, "CHUNK_ELEMENTS", elements)
        fresh_cache.entries.clear()
        assert mask.compile(97, block=(8, 16)) == whole
        assert (mask.dense(97) == dense).all()


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


def test_equal_masks_share_what_is_compiled(fresh_cache):
    first = (masks.causal() & masks.sliding_window(5)).compile(64)
    assert (masks.causal() & masks.sliding_window(5)).compile(64, 64, block=(64, 64)) is first
    assert (masks.causal() & masks.sliding_window(5)).compile(64, block=(32, 64)) is not first


def test_cache_is_bounded(monkeypatch, fresh_cache):
    size = compilation._size(masks.sliding_window(5).compile(512))
    monkeypatch.setattr(compilation, "CACHE_BYTES", 4 * size)
    for window in range(6, 40):
        masks.sliding_window(window).compile(512)
    assert fresh_cache.bytes == sum(map(compilation._size, fresh_cache.entries.values())) <= 4 * size
    kept = [key[0].arguments["window"] for key in fresh_cache.entries]
    assert kept and kept == sorted(kept) and kept[-1] == 39, "the latest stay"


def test_what_exceeds_the_cache_still_compiles(monkeypatch, fresh_cache):
    monkeypatch.setattr(compilation, "CACHE_BYTES", 10)
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
