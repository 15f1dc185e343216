"""The benchmark's masks: formulas against the project's library, and what peers are given against both."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.peers import patterns
from benchmarks.peers.cases import (
    DECODE_MASKS,
    GRID_MASKS,
    GRID_SHAPES,
    LONG,
    PUBLISHED_MASKS,
    WITHIN_CAUSAL,
    attention_cases,
)
from benchmarks.peers.cudnn_bsa import whole_blocks
from benchmarks.peers.cudnn_flex import key_ranges
from benchmarks.peers.flashinfer_bsr import blocks_of
from benchmarks.peers.flex import block_mask_of
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.systems import systems_for

# Arguments of long masks are for long inputs; at the tests' lengths the same masks with others drop something.
LONG_MASKS = {mask for _, masks, _ in LONG for mask in masks} | {"causal_window-100", "prefix-70"}
SQUARE = tuple(dict.fromkeys((*GRID_MASKS, *PUBLISHED_MASKS, "full_blocks", "part_blocks", *sorted(LONG_MASKS))))


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


@pytest.mark.parametrize("name", ["bigbird", "video", "random_blocks-0.25"])
def test_rows_come_in_chunks_of_whole_blocks(name, monkeypatch):
    whole = Pattern(name, 700, 700)
    monkeypatch.setattr(patterns, "CHUNK_ELEMENTS", 300 * 700)
    pieces = Pattern(name, 700, 700)
    assert [len(some) for some in pieces.chunks()] == [256, 256, 188]
    assert torch.equal(pieces.dense, whole.dense)
    assert torch.equal(pieces.rows(torch.tensor([699, 5])), whole.dense[[699, 5]])
    assert pieces.density == whole.density == float(whole.dense.double().mean())
    assert pieces.used_keys == whole.used_keys == float(whole.dense.any(dim=0).double().mean())


def test_shares_of_the_longest_masks_need_no_tensor_of_them(monkeypatch):
    monkeypatch.setattr(Pattern, "dense", property(lambda pattern: pytest.fail("the whole mask was asked for")))
    pattern = Pattern("causal_window-16", 2048, 2048)
    assert pattern.density == pytest.approx((2048 * 16 - 15 * 16 / 2) / 2048**2) and pattern.used_keys == 1


def test_video_tiles_see_their_neighbours_of_a_canvas():
    assert Pattern("video", 960, 960).density == (10 / 16) * (10 / 16) * (16 / 36)
    pattern = Pattern("video", 24576, 24576)

    def token(frame, line, column):
        """The first token of the tile that holds this place of 16 × 32 × 48."""
        return 256 * ((frame // 4 * 4 + line // 8) * 6 + column // 8)

    i = torch.tensor(token(4, 8, 16))
    for place, kept in [((0, 0, 8), True), ((11, 23, 31), True), ((12, 8, 16), False), ((4, 24, 16), False)]:
        assert bool(pattern.keep(i, torch.tensor(token(*place)))) == kept
    assert not pattern.keep(i, torch.tensor(token(4, 8, 40)))


def test_random_tiles_keep_the_same_share_of_every_row():
    tiles = Pattern("random_tiles-0.25", 1024, 1024).dense.view(8, 128, 8, 128)
    assert torch.equal(tiles.all(dim=3).all(dim=1), tiles.any(dim=3).any(dim=1))
    assert tiles[:, 0, :, 0].sum(1).tolist() == [2] * 8 and len(tiles[:, 0, :, 0].unique(dim=0)) > 4


def test_unknown_mask_is_named():
    with pytest.raises(ValueError, match="'windoww'"):
        Pattern("windoww", 128, 128)


@pytest.mark.parametrize("name", GRID_MASKS)
@pytest.mark.parametrize("block", [(128, 128), (128, 64)])
def test_block_mask_is_the_one_flex_attention_would_create(name, block):
    pattern = Pattern(name, 384, 384)

    def mask_mod(b, h, i, j):
        return pattern.keep(i, j)

    ours = block_mask_of(pattern.chunks(), (384, 384), mask_mod, block)
    theirs = create_block_mask(mask_mod, None, None, 384, 384, device="cpu", BLOCK_SIZE=block)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for counts, columns in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(ours, counts), getattr(theirs, counts))
        for row, count in enumerate(getattr(ours, counts)[0, 0]):
            listed = [getattr(mask, columns)[0, 0, row, :count] for mask in (ours, theirs)]
            assert torch.equal(*listed)


def test_block_mask_of_one_query_and_ragged_lengths():
    keep = Pattern("random_blocks-0.25", 1, 600).dense
    mask = block_mask_of([keep], (1, 600), lambda b, h, i, j: keep[i, j], (128, 64))
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


def spelled(ranges, kv_len):
    """The mask (queries, kv_len) of ranges of keys."""
    ends, j = ranges[0].T, torch.arange(kv_len)
    out = j < ends[:, :1]
    for n in range(1, ends.shape[1], 2):
        out = out | ((j >= ends[:, n : n + 1]) & (j < ends[:, n + 1 : n + 2]))
    return out


@pytest.mark.parametrize("name", [*SQUARE, "random_blocks-0.25"])
def test_ranges_of_keys_spell_out_the_mask(name, monkeypatch):
    monkeypatch.setattr(patterns, "CHUNK_ELEMENTS", 128 * 384)
    pattern = Pattern(name, 384, 384)
    ranges = key_ranges(pattern)
    assert ranges.dtype == torch.int32 and ranges.is_contiguous() and ranges.shape[1] % 2 == 1
    assert torch.equal(spelled(ranges, 384), pattern.dense)


def test_rows_without_keys_have_empty_ranges(monkeypatch):
    pattern = Pattern("full_blocks", 256, 256)
    monkeypatch.setattr(pattern, "keep", lambda i, j: (i % 2 == 1) & (j >= 3))
    assert torch.equal(spelled(key_ranges(pattern), 256), pattern.dense)


@pytest.mark.parametrize("name, side", [("random_tiles-0.25", 128), ("full_blocks", 64), ("video", 64)])
def test_lists_of_whole_blocks_spell_out_the_mask(name, side):
    length = 1024 if side == 128 else 96 * 64
    pattern = Pattern(name, length, length)
    block, columns, counts, count = whole_blocks(pattern)
    assert block == side and columns.dtype == torch.int32 and (counts is None) == (count is not None)
    counts = torch.full((1, 1, length // side), count) if counts is None else counts
    blocks = torch.zeros(length // side, length // side, dtype=torch.bool)
    for row, some in enumerate(counts[0, 0]):
        blocks[row, columns[0, 0, row, :some]] = True
    assert torch.equal(blocks.repeat_interleave(side, 0).repeat_interleave(side, 1), pattern.dense)


def test_masks_that_are_no_lists_of_whole_blocks_are_refused():
    with pytest.raises(RuntimeError, match="'causal' is not of whole blocks of 128 or 64"):
        whole_blocks(Pattern("causal", 256, 256))
    with pytest.raises(RuntimeError, match="rows that keep nothing"):
        whole_blocks(Pattern("full_blocks", 1024, 1024))


def test_systems_are_given_only_masks_that_they_can_take():
    for case in attention_cases():
        systems, length = set(systems_for(case)), min(case.q_len, 1024)
        if "cudnn-flex" in systems:
            assert key_ranges(Pattern(case.mask, length, length)).shape[1] <= 19
        assert ("cudnn-bsa" in systems) == case.mask.startswith(("random_tiles", "video"))
        assert ("fastvideo" in systems) == ("cudnn-bsa" in systems and case.dtype == "bfloat16")
        assert case.mask != "causal_window-1024" or systems == {
            "stof", "flex-analytic", "flex-fa4-analytic", "fa4", "cudnn-flex"
        }  # fmt: skip


def test_every_grid_length_fits_the_blocks_of_all_peers():
    assert all(length % 128 == 0 for _, _, length, _ in GRID_SHAPES)
