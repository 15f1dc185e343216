"""Block-sparse storage: round trips, bit order, derived arrays."""

import doctest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tir_kernels
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import count_bits, pack_bitmap, unpack_bitmap
from tir_kernels.masks.block_sparse import BlockSparseMask

BLOCKS = [(8, 8), (16, 32), (64, 64), (128, 64)]


@st.composite
def dense_masks(draw):
    """Boolean arrays with empty, full and mixed regions, 2 to 4 dimensions, odd lengths."""
    lead = draw(st.sampled_from([(), (1,), (3,), (1, 1), (2, 1), (2, 3)]))
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keep = rng.random((*lead, q_len, kv_len)) < draw(st.sampled_from([0.02, 0.5, 0.98]))
    keep[..., : draw(st.integers(0, q_len)), : draw(st.integers(0, kv_len))] = draw(st.booleans())
    if lead and draw(st.booleans()):
        keep[...] = keep[(0,) * len(lead)]
    return keep


@settings(max_examples=60, deadline=None)
@given(dense_masks(), st.sampled_from([(8, 8), (16, 8), (8, 24), (32, 64)]))
def test_round_trip(keep, block):
    mask = BlockSparseMask.from_dense(keep, block).validate()
    restored = mask.to_dense()
    assert restored.shape == (1,) * (4 - keep.ndim) + keep.shape
    np.testing.assert_array_equal(restored.reshape(keep.shape), keep)
    assert mask.density == pytest.approx(keep.mean())
    assert mask.is_empty == (not keep.any())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(97, 97), (113, 203), (257, 64), (1, 1023)])
def test_classification_of_blocks(shape, block):
    """Counting each block by loops gives the listed blocks, their kind and their order."""
    q_len, kv_len = shape
    i, j = np.ogrid[:q_len, :kv_len]
    keep = (j // 40 <= i // 40) & ~((i > 60) & (j < 9))
    mask = BlockSparseMask.from_dense(keep, block)
    block_m, block_n = block
    lists = {"full": [], "part": [], "load": []}
    for r in range(0, q_len, block_m):
        for c in range(0, kv_len, block_n):
            kept = keep[r : r + block_m, c : c + block_n].sum()
            if kept:
                lists["full" if kept == block_m * block_n else "part"].append((r // block_m, c // block_n))
                lists["load"].append((r // block_m, c // block_n))
    for name, blocks in lists.items():
        pointer, columns = getattr(mask, f"{name}_row_ptr"), getattr(mask, f"{name}_col_idx")
        listed = [(r, c) for r in range(mask.n_block_rows) for c in columns[pointer[r] : pointer[r + 1]]]
        assert listed == blocks


def test_bit_order():
    """Element (row, col) is bit 8 * (row % 8) + col % 8 of tile (row // 8, col // 8), tiles column-major."""
    rng = np.random.default_rng(0)
    blocks = rng.random((3, 24, 16)) < 0.4
    bitmap = pack_bitmap(blocks)
    assert bitmap.shape == (3, 6) and bitmap.dtype == np.uint64
    for n, row, col in np.ndindex(blocks.shape):
        word = int(bitmap[n, (col // 8) * 3 + row // 8])
        assert (word >> (8 * (row % 8) + col % 8)) & 1 == blocks[n, row, col]
    np.testing.assert_array_equal(unpack_bitmap(bitmap, 24, 16), blocks)
    np.testing.assert_array_equal(count_bits(bitmap), blocks.sum(axis=(1, 2)))


def test_lane_bits_are_those_of_an_mma_accumulator():
    tile = np.random.default_rng(1).random((1, 8, 8)) < 0.5
    word = int(pack_bitmap(tile)[0, 0])
    for lane in range(32):
        row, col = lane // 4, 2 * (lane % 4)
        assert (word >> (2 * lane)) & 3 == tile[0, row, col] + 2 * tile[0, row, col + 1]


def test_equal_patterns_are_stored_once():
    rng = np.random.default_rng(2)
    a, b = rng.random((2, 40, 40)) < 0.5
    mask = BlockSparseMask.from_dense(np.array([[a, b, a], [b, b, a]]), (16, 16))
    assert mask.n_patterns == 2
    assert mask.head_to_mask.tolist() == [[0, 1, 0], [1, 1, 0]]
    assert mask.density == pytest.approx((a.mean() + b.mean()) / 2)


def test_head_map_broadcasts_or_says_why_not():
    mask = BlockSparseMask.from_dense(np.random.default_rng(3).random((2, 1, 9, 9)) < 0.5, (8, 8))
    assert mask.head_map(2, 4).tolist() == [[0] * 4, [1] * 4]
    with pytest.raises(MaskError, match=r"\(2, 1\), which does not broadcast to \(3, 4\)"):
        mask.head_map(3, 4)


def test_derived_arrays():
    """row_order lists heavy rows first, load_part_idx leads from the load list into the bitmaps."""
    keep = np.random.default_rng(4).random((2, 64, 96)) < 0.02
    keep[0, 24:40, :64] = True
    mask = BlockSparseMask.from_dense(keep, (8, 16))
    counts = np.diff(mask.load_row_ptr).reshape(2, 8)
    for pattern, order in enumerate(mask.row_order.reshape(2, 8)):
        assert sorted(order) == list(range(8))
        assert list(counts[pattern][order]) == sorted(counts[pattern], reverse=True)
    for r in range(16):
        for k in range(mask.load_row_ptr[r], mask.load_row_ptr[r + 1]):
            column, index = mask.load_col_idx[k], mask.load_part_idx[k]
            kind = "full" if index < 0 else "part"
            pointer, columns = getattr(mask, f"{kind}_row_ptr"), getattr(mask, f"{kind}_col_idx")
            assert column in columns[pointer[r] : pointer[r + 1]]
            if index >= 0:
                assert pointer[r] <= index < pointer[r + 1] and columns[index] == column
    assert (mask.load_part_idx >= 0).sum() == len(mask.part_col_idx)


def test_digest_and_hash():
    keep = np.tri(20, dtype=bool)
    a, b = (BlockSparseMask.from_dense(keep, (8, 8)) for _ in range(2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != BlockSparseMask.from_dense(keep, (8, 16))
    assert a != BlockSparseMask.from_dense(keep[:, :19], (8, 8))


@pytest.mark.parametrize(
    "keep, block, message",
    [
        (np.ones((4, 4)), (8, 8), "must be boolean, got float64"),
        (np.ones(4, bool), (8, 8), r"2 to 4 dimensions, none of them 0, got shape \(4,\)"),
        (np.ones((0, 4), bool), (8, 8), r"none of them 0, got shape \(0, 4\)"),
        (np.ones((4, 4), bool), (8, 12), "block width 12 must be a positive multiple of 8"),
        (np.ones((4, 4), bool), (0, 8), "block height 0 must be a positive multiple of 8"),
        (np.ones((4, 4), bool), (8.0, 8), "block height 8.0 must be"),
        (np.ones((4, 4), bool), 64, r"block=64 must be a pair"),
    ],
)
def test_from_dense_refuses(keep, block, message):
    with pytest.raises(MaskError, match=message):
        BlockSparseMask.from_dense(keep, block)


def test_examples_of_the_readme():
    readme = Path(tir_kernels.__file__).with_name("README.md")
    failed, tried = doctest.testfile(str(readme), module_relative=False)
    assert failed == 0 and tried >= 10


@pytest.mark.parametrize("lengths", [(64, 128), (97, 257), (7, 300), (1, 1)])
@pytest.mark.parametrize("block", [(8, 8), (64, 64), (128, 32)])
def test_keep_all_is_the_mask_of_ones(lengths, block):
    expected = BlockSparseMask.from_dense(np.ones(lengths, bool), block)
    assert BlockSparseMask.keep_all(*lengths, block).validate() == expected
