"""Every rule of the storage format is checked, and its error names array, index, value and rule."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask


@pytest.fixture(scope="module")
def mask():
    """20×20 in 8×8 blocks, causal except one hole: 3×3 blocks, the last row and column over the edge.

    full (1, 0); part (0, 0), (1, 1), (2, 0), (2, 1), (2, 2).
    """
    stored = BlockSparseMask.from_dense(np.tri(20, dtype=bool), (8, 8))
    assert stored.full_col_idx.tolist() == [0] and stored.part_col_idx.tolist() == [0, 1, 0, 1, 2]
    return stored.validate()


def i32(*values):
    return np.array(values, np.int32)


KINDS, ARRAYS = ("full", "part", "load"), ("row_ptr", "col_idx")
CASES = [
    ({"q_len": 0}, "q_len is 0, must be a positive integer"),
    ({"block_n": 12}, "block width 12 must be a positive multiple of 8"),
    ({"full_row_ptr": np.array([0, 0, 1, 1])}, "full_row_ptr is int64"),
    ({"bitmap": np.zeros(5, np.uint64)}, r"bitmap is uint64 \(5,\), must be uint64 with 2 dimension"),
    ({"head_to_mask": [[0]]}, "head_to_mask is list, must be int32"),
    ({"load_row_ptr": i32(0, 1, 3)}, "load_row_ptr has 3 entries, must have 1 \\+ a positive multiple of the 3 block"),
    ({"part_row_ptr": i32(0, 1, 5)}, "part_row_ptr has 3 entries, must have 4"),
    ({"load_row_ptr": i32(1, 1, 3, 6)}, r"load_row_ptr\[0\] is 1, must be 0"),
    ({"load_row_ptr": i32(0, 4, 3, 6)}, r"load_row_ptr\[2\] is 3, must not be less than the entry before it"),
    ({"load_row_ptr": i32(0, 1, 3, 5)}, r"load_row_ptr\[3\] is 5, must be 6, the length of load_col_idx"),
    ({"full_col_idx": i32(3)}, r"full_col_idx\[0\] is 3, must be in 0…2"),
    ({"part_col_idx": i32(-1, 1, 0, 1, 2)}, r"part_col_idx\[0\] is -1, must be in 0…2"),
    ({"part_col_idx": i32(0, 1, 1, 0, 2)}, r"part_col_idx\[3\] is 0, must exceed the column before it"),
    ({"part_col_idx": i32(0, 1, 0, 0, 2)}, r"part_col_idx\[3\] is 0, must exceed the column before it"),
    ({"part_col_idx": i32(0, 0, 0, 1, 2)}, r"part_col_idx\[1\] is 0, is listed as full, too"),
    ({"load_col_idx": i32(0, 0, 2, 0, 1, 2)}, r"load_col_idx\[2\] is 2, is neither full nor part"),
    (
        {"load_col_idx": i32(0, 1, 0, 1, 2), "load_row_ptr": i32(0, 1, 2, 5)},
        r"full_col_idx\[0\] is 0, is not in load_col_idx",
    ),
    ({"bitmap": np.ones((5, 2), np.uint64)}, r"bitmap has shape \(5, 2\), must have \(5, 1\)"),
    ({"head_to_mask": np.array([[0, 1]], np.int32)}, r"head_to_mask.flat\[1\] is 1, must be in 0…0"),
    ({"head_to_mask": np.zeros((0, 1), np.int32)}, r"head_to_mask has shape \(0, 1\)"),
]


@pytest.mark.parametrize("changes, message", CASES, ids=[message[:40] for _, message in CASES])
def test_broken_rule(mask, changes, message):
    with pytest.raises(MaskError, match=message):
        dataclasses.replace(mask, **changes).validate()


@pytest.mark.parametrize(
    "block, word, message",
    [
        (1, 0, r"bitmap\[1\] is 0, bits set: an empty block must not be listed"),
        (1, 2**64 - 1, r"bitmap\[1\] is 64, bits set: a full block belongs in full_col_idx"),
        (4, 1 << 4, r"bitmap\[4\] keeps an element past kv_len=20"),
        (2, 1 << 32, r"bitmap\[2\] keeps an element past q_len=20"),
    ],
)
def test_broken_bitmap(mask, block, word, message):
    bitmap = mask.bitmap.copy()
    bitmap[block] = word
    with pytest.raises(MaskError, match=message):
        dataclasses.replace(mask, bitmap=bitmap).validate()


def test_full_block_over_the_edge():
    stored = BlockSparseMask.from_dense(np.ones((8, 16), bool), (8, 8)).validate()
    with pytest.raises(MaskError, match=r"full_col_idx\[1\] is 1, is past q_len or kv_len"):
        dataclasses.replace(stored, kv_len=12).validate()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_what_passes_is_a_mask(seed, data):
    """The rules are complete: storage in which one value is another breaks one, or is the storage of some mask."""
    rng = np.random.default_rng(seed)
    keep = rng.random((1, 2, 20, 27)) < data.draw(st.sampled_from([0.05, 0.5, 0.97]))
    keep[0, 0, :8, :16] = True
    stored = BlockSparseMask.from_dense(keep, (8, 8))
    name = data.draw(st.sampled_from(["bitmap", "head_to_mask", *(f"{k}_{a}" for k in KINDS for a in ARRAYS)]))
    array = getattr(stored, name).copy()
    if not array.size:
        return
    place = np.unravel_index(data.draw(st.integers(0, array.size - 1)), array.shape)
    if name == "bitmap":
        array[place] ^= np.uint64(1) << np.uint64(data.draw(st.integers(0, 63)))
    else:
        array[place] = data.draw(st.integers(-1, 7))
    changed = dataclasses.replace(stored, **{name: array})
    try:
        changed.validate()
    except MaskError:
        return
    dense = changed.to_dense()
    again = BlockSparseMask.from_dense(dense, (8, 8))
    np.testing.assert_array_equal(again.to_dense(), dense)
    assert len(again.part_col_idx) <= len(changed.part_col_idx)
