"""The benchmark's masks: formulas against the project's library, and what peers are given against both."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.peers.cases import DECODE_MASKS, GRID_MASKS, GRID_SHAPES, PUBLISHED_MASKS, WITHIN_CAUSAL
from benchmarks.peers.flashinfer_bsr import blocks_of
from benchmarks.peers.flex import block_mask_of
from benchmarks.peers.patterns import Pattern

SQUARE = (*GRID_MASKS, *PUBLISHED_MASKS, "full_blocks", "part_blocks")


@pytest.mark.parametrize("length", [128, 256, 1024])
@pytest.mark.parametrize("name", SQUARE)
def test_formula_and_library_keep_the_same(name, length):
    pattern = Pattern(name, length, length)
    assert torch.equal(pattern.stof_mask().dense(length), pattern.dense)


@pytest.mark.parametrize("name", DECODE_MASKS)
def test_decoding_masks_keep_their_share_of_key_blocks(name):
    pattern = Pattern(name, 1, 4096)
    assert torch.equal(pattern.stof_mask().dense(1, 4096), pattern.dense)
    assert pattern.density == round(float(name.partition("-")[2]) * 64) / 64 == pattern.used_keys


def test_grid_masks_are_sparse_where_the_requirements_count_on_it():
    for name in GRID_MASKS:
        assert (Pattern(name, 2048, 2048).density < 0.25) == (name != "causal")


def test_widths_are_square_roots_unless_given():
    i, j = torch.tensor([100, 100]), torch.tensor([132, 133])
    assert Pattern("sliding_window", 1024, 1024).keep(i, j).tolist() == [True, False]
    assert Pattern("sliding_window-32", 4096, 4096).keep(i, j).tolist() == [True, False]
    assert Pattern("sliding_window", 4096, 4096).keep(i, j).tolist() == [True, True]


def test_masks_within_causal_keep_nothing_after_the_query():
    future = ~torch.ones(256, 256, dtype=torch.bool).tril()
    for name in GRID_MASKS:
        assert (not (Pattern(name, 256, 256).dense & future).any()) == (name in WITHIN_CAUSAL)


def test_part_blocks_has_no_full_block_and_lists_what_full_blocks_lists():
    part, full = (Pattern(name, 512, 512).stof_mask() for name in ("part_blocks", "full_blocks"))
    for block in ((16, 16), (64, 64), (128, 32)):
        a, b = part.compile(512, block=block), full.compile(512, block=block)
        assert np.array_equal(a.load_col_idx, b.load_col_idx) and len(a.full_col_idx) == 0
    assert len(full.compile(512, block=(64, 64)).part_col_idx) == 0


def test_unknown_mask_is_named():
    with pytest.raises(ValueError, match="'windoww'"):
        Pattern("windoww", 128, 128)


@pytest.mark.parametrize("name", GRID_MASKS)
@pytest.mark.parametrize("block", [(128, 128), (128, 64)])
def test_block_mask_is_the_one_flex_attention_would_create(name, block):
    pattern = Pattern(name, 384, 384)

    def mask_mod(b, h, i, j):
        return pattern.keep(i, j)

    ours = block_mask_of(pattern.dense, mask_mod, block)
    theirs = create_block_mask(mask_mod, None, None, 384, 384, device="cpu", BLOCK_SIZE=block)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, columns in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(ours, counts), getattr(theirs, counts))
        for row, count in enumerate(getattr(ours, counts)[0, 0]):
            listed = [getattr(mask, columns)[0, 0, row, :count] for mask in (ours, theirs)]
            assert torch.equal(*listed)


def test_block_mask_of_one_query_and_ragged_lengths():
    keep = Pattern("random_blocks-0.25", 1, 600).dense
    mask = block_mask_of(keep, lambda b, h, i, j: keep[i, j], (128, 64))
    assert mask.seq_lengths == (1, 600)
    assert int(mask.kv_num_blocks) == int(keep.view(-1)[::64].sum())


@pytest.mark.parametrize("name", ["bigbird", "full_blocks", "causal"])
def test_block_sparse_rows_of_a_batch_spell_out_the_mask(name):
    keep = Pattern(name, 256, 256).dense
    indptr, indices, bits = blocks_of(keep, 64, batch=2)
    assert (bits is None) == (name == "full_blocks")
    spelled = torch.zeros(512, 512, dtype=torch.bool)
    for row in range(8):
        for n in range(indptr[row], indptr[row + 1]):
            block = True if bits is None else bits[n]
            spelled[row * 64 : row * 64 + 64, indices[n] * 64 : indices[n] * 64 + 64] = block
    assert torch.equal(spelled, torch.block_diag(keep, keep).bool())


def test_every_grid_length_fits_the_blocks_of_all_peers():
    assert all(length % 128 == 0 for _, _, length, _ in GRID_SHAPES)
