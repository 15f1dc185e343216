"""The arrays and tensor maps that the warp-specialized kernel reads, against the dense mask and the layouts."""

import numpy as np
import pytest

from tir_kernels.attention.block_wise.operands import lane_keep_bits
from tir_kernels.attention.problem import AttentionProblem, BlockMap, Layouts, View
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import Geometry
from tir_kernels.attention.warp_specialized.operands import READ_AHEAD, warp_specialized_operands
from tir_kernels.attention.warp_specialized.producer import class_sizes, tensor_map_fields
from tir_kernels.attention.warp_specialized.work import Item, listed_blocks
from tir_kernels.cuda.device import H200
from tir_kernels.cuda.shared_tiles import PanelTile
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.leading_rows import with_leading_rows
from tir_kernels.target import parse_target

SM_90A = parse_target("cuda -arch=sm_90a")


def problem(keep, batch=1, heads=2, **rest):
    return AttentionProblem(batch, heads, heads, *keep.shape[-2:], 64, 64, "float16", 0.125, **rest)


def random_masks(q_len, kv_len) -> np.ndarray:
    """Masks of two heads: the first has full blocks, the second rows of blocks that keep nothing."""
    rng = np.random.default_rng(q_len + kv_len)
    keep = rng.random((2, q_len, kv_len)) < 0.4
    keep[0, :64, :64] = True
    keep[1, 64:] = False
    return keep


def decode(mask, operands, head, before=0):
    """The dense mask of one head as the kernel's lanes see it, and how often each block was visited.

    The items' first rows are those of a mask that has `before` rows less.
    """
    items, entries, keep_bits, *_ = operands
    shape = mask.n_block_rows * mask.block_m, mask.n_block_cols * mask.block_n
    dense, visits = np.zeros(shape, bool), np.zeros((mask.n_block_rows, mask.n_block_cols), int)
    lane, i = np.arange(32)[:, None], np.arange(mask.block_n // 2)
    row, column = i % 4 // 2 * 8 + lane // 4, i // 4 * 8 + lane % 4 * 2 + i % 2
    for item in items[items[:, Item.HEAD] == head]:
        begin, full, end, first_row = item[[Item.BEGIN, Item.FULL, Item.END, Item.FIRST_ROW]]
        first_row += before
        assert begin <= full <= end and begin < end
        assert (entries[begin:full, 1] >= 0).all() and (entries[full:end, 1] == -1).all(), "partial blocks come first"
        for first_key, part in entries[begin:end]:
            block = dense[first_row : first_row + mask.block_m, first_key : first_key + mask.block_n]
            visits[first_row // mask.block_m, first_key // mask.block_n] += 1
            if part < 0:
                block[...] = True
                continue
            for m in range(mask.block_m // 16):
                block[m * 16 + row, column] = keep_bits[part, m, lane, i // 32] >> (i % 32) & 1
    return dense[: mask.q_len, : mask.kv_len], visits


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (192, 64)])
@pytest.mark.parametrize("q_len, kv_len", [(97, 97), (413, 203), (256, 128), (70, 4000)])
def test_lanes_see_the_dense_mask_and_visit_every_listed_block_once(q_len, kv_len, block):
    keep = random_masks(q_len, kv_len)
    mask = BlockSparseMask.from_dense(keep, block)
    operands = sum(warp_specialized_operands(mask, problem(keep), H200, 132), [])
    for head in range(2):
        dense, visits = decode(mask, operands, head)
        np.testing.assert_array_equal(dense, keep[head])
        m, n = block
        padded = np.pad(keep[head], [(0, -q_len % m), (0, -kv_len % n)])
        listed = padded.reshape(visits.shape[0], m, visits.shape[1], n).any(axis=(1, 3))
        empty = ~listed.any(axis=1)
        np.testing.assert_array_equal(visits[~empty], listed[~empty])
        assert (visits[empty].sum(axis=1) == 1).all(), "a row without work has one block"


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("q_len, before", [(40, 128), (250, 128), (256, 128), (300, 64), (450, 64), (500, 64)])
def test_block_rows_end_where_the_sequence_ends(q_len, before, block_n):
    keep = random_masks(q_len, 203)
    given, config = problem(keep), specialized.Config(192, block_n, 2)
    assert Geometry(given, config).leading_rows == before
    mask = BlockSparseMask.from_dense(keep, (192, block_n))
    operands = specialized.operands(given, config, SM_90A, mask).arrays
    first_rows = operands[0][:, Item.FIRST_ROW]
    assert first_rows.max() == -(-q_len // 64) * 64 - 192 and set(first_rows) == {*range(-before, q_len, 192)}
    for head in range(2):
        dense, _ = decode(with_leading_rows(mask, before), operands, head, before)
        np.testing.assert_array_equal(dense[before:], keep[head])


def test_under_a_causal_mask_rows_before_the_first_token_are_the_cheapest():
    keep = np.tril(np.ones((4096, 4096), bool))
    given, config = problem(keep), specialized.Config(192, 128, 2)
    mask = BlockSparseMask.from_dense(keep, (192, 128))
    listed = {}
    for rows in (0, Geometry(given, config).leading_rows):
        (items, *_), _ = warp_specialized_operands(mask, given, H200, 132, leading_rows=rows)
        of_head = items[items[:, Item.HEAD] == 0]
        tiles, full = (int((of_head[:, end] - of_head[:, Item.BEGIN]).sum()) for end in (Item.END, Item.FULL))
        by_hand = [-(-min(first + 192 - rows, 4096) // 128) for first in range(0, 4096 + rows, 192)]
        assert tiles == sum(by_hand)
        listed[rows] = tiles, full
    assert listed == {0: (384, 74), 128: (363, 43)}


@pytest.mark.parametrize("block_m, block_map", [(192, BlockMap(1, 1, 1920, 1920)), (128, None), (64, None)])
def test_other_block_rows_begin_at_the_first_token(block_m, block_map):
    keep = random_masks(300, 300)
    given, config = problem(keep, block_map=block_map), specialized.Config(block_m, 64, 2)
    mask = BlockSparseMask.from_dense(keep, (block_m, 64))
    items, *_ = specialized.operands(given, config, SM_90A, mask).arrays
    assert {*items[:-1, Item.FIRST_ROW]} == {*range(0, 300, block_m)}


def test_added_blocks_of_empty_rows_keep_nothing():
    keep = np.zeros((300, 200), bool)
    keep[70:80, 100:] = True
    mask = BlockSparseMask.from_dense(keep, (64, 64))
    listed = listed_blocks(mask)
    assert listed.row_ptr.tolist() == [0, 1, 4, 5, 6, 7] and (listed.full_ptr == listed.row_ptr[1:]).all()
    added = listed.part == len(mask.bitmap)
    assert added.tolist() == [True, False, False, False, True, True, True] and not listed.column[added].any()
    (items, entries, keep_bits), _ = warp_specialized_operands(mask, problem(keep), H200, 132)
    assert len(keep_bits) == len(mask.bitmap) + 1 and not keep_bits[-1].any() and keep_bits[:-1].any()
    assert entries[:-READ_AHEAD].tolist() == [[64 * c, p] for c, p in zip(listed.column, listed.part)]
    assert entries[-READ_AHEAD:].tolist() == [[0, -1]] * READ_AHEAD


def test_blocks_of_a_row_are_partial_then_full_and_ascend():
    keep = random_masks(413, 703)
    keep[:, 128:256, 64:192] = True
    mask = BlockSparseMask.from_dense(keep, (64, 64))
    listed = listed_blocks(mask)
    for begin, full, end in zip(listed.row_ptr, listed.full_ptr, listed.row_ptr[1:]):
        for part in (slice(begin, full), slice(full, end)):
            assert (np.diff(listed.column[part]) > 0).all()
        assert (listed.part[begin:full] >= 0).all() and (listed.part[full:end] == -1).all()


@pytest.mark.parametrize("batch, heads, length", [(1, 2, 700), (2, 3, 4000)])
def test_splits_share_the_blocks_of_a_row_and_have_slots_of_their_own(batch, heads, length):
    i, j = np.arange(length)[:, None], np.arange(length)
    keep = (abs(i - j) <= 32) | (i < 32)
    mask = BlockSparseMask.from_dense(keep, (64, 64))
    (items, *_), (partials, arrivals, taken) = warp_specialized_operands(mask, problem(keep, batch, heads), H200, 132)
    listed = listed_blocks(mask)
    rows = {}
    for item in items:
        rows.setdefault((item[Item.HEAD], item[Item.FIRST_ROW]), []).append(item)
    assert set(rows) == {(h, r) for h in range(batch * heads) for r in range(0, length, 64)}
    slots = []
    for (_, first_row), parts in rows.items():
        parts = np.array(parts)
        row = first_row // 64
        assert parts[:, Item.SPLIT].tolist() == [*range(len(parts))] and (parts[:, Item.SPLITS] == len(parts)).all()
        assert parts[0, Item.BEGIN] == listed.row_ptr[row] and parts[-1, Item.END] == listed.row_ptr[row + 1]
        assert (parts[1:, Item.BEGIN] == parts[:-1, Item.END]).all() and len(set(parts[:, Item.FIRST_SLOT])) == 1
        inside = np.clip(listed.full_ptr[row], parts[:, Item.BEGIN], parts[:, Item.END])
        assert (parts[:, Item.FULL] == inside).all()
        if len(parts) > 1:
            slots += range(parts[0, Item.FIRST_SLOT], parts[0, Item.FIRST_SLOT] + len(parts))
    assert slots and sorted(slots) == [*range(len(partials))] and len(arrivals) == len(partials)


def test_arrays_are_never_empty_and_the_workspace_is_zero():
    for keep in (np.zeros((64, 64), bool), np.ones((64, 64), bool)):
        mask = BlockSparseMask.from_dense(keep, (128, 64))
        given, workspace = warp_specialized_operands(mask, problem(keep), H200, 132)
        assert all(array.size and array.flags.c_contiguous for array in [*given, *workspace])
        assert [a.dtype.name for a in given] == ["int32", "int32", "uint32"]
        assert [a.dtype.name for a in workspace] == ["float32", "uint32", "uint32"]
        assert not any(array.any() for array in workspace)
        assert workspace[1].shape == (1, 2) and workspace[2].shape == (1,)


def test_patterns_are_spread_over_batch_and_heads():
    keep = np.stack([np.eye(64, dtype=bool), np.ones((64, 64), bool)])[:, None]
    mask = BlockSparseMask.from_dense(keep, (64, 64))
    operands = sum(warp_specialized_operands(mask, problem(keep, batch=2, heads=3), H200, 132), [])
    for head in range(6):
        np.testing.assert_array_equal(decode(mask, operands, head)[0], keep[head // 3, 0])


PLAIN = AttentionProblem(2, 4, 2, 90, 100, 96, 80, "float16", 0.125)
TOKEN = 8 * 96  # elements of a token in a projection of q, k and v


@pytest.mark.parametrize(
    "layout, sizes, strides",
    [
        ("bhsd", (96, 100, 2, 2), (96, 100 * 96, 2 * 100 * 96)),
        ("bshd", (96, 100, 2, 2), (2 * 96, 96, 100 * 2 * 96)),
        ("sbhd", (96, 100, 2, 2), (4 * 96, 96, 2 * 96)),
        ("hsbd", (96, 100, 2, 2), (2 * 96, 2 * 100 * 96, 96)),
        (View(2 * 100 * TOKEN, 4 * 96, 100 * TOKEN, 96, TOKEN), (96, 100, 2, 2), (TOKEN, 96, 100 * TOKEN)),
        (View(2 * 100 * 96, 0, 9600, 0, 96), (96, 100, 1, 2), (96, 96, 9600)),
        (View(100 * TOKEN, 0, 0, 96, TOKEN), (96, 100, 2, 1), (TOKEN, 96, TOKEN)),
        (View(100 * 96, 0, 0, 0, 96), (96, 100, 1, 1), (96, 96, 96)),
    ],
)
def test_tensor_maps_are_innermost_first_and_repeat_what_is_repeated(layout, sizes, strides):
    given = AttentionProblem(**{**vars(PLAIN), "layouts": Layouts(k=layout)})
    (fields,) = tensor_map_fields(given, "k", PanelTile(128, 96, 256))
    assert fields == (*sizes, *(2 * n for n in strides), 32, 128, 1, 1, 1, 1, 1, 1, 0, 2, 3, 0)


@pytest.mark.parametrize(
    "layout, stride, sizes, strides",
    [
        ("bhsd", 2, [(96, 50, 2, 2, 2)], (2 * 96, 96, 100 * 96, 2 * 100 * 96)),
        ("bhsd", 7, [(96, 15, 7, 2, 2), (96, 14, 7, 2, 2)], (7 * 96, 96, 100 * 96, 2 * 100 * 96)),
        ("sbhd", 3, [(96, 34, 3, 2, 2), (96, 33, 3, 2, 2)], (3 * 4 * 96, 4 * 96, 96, 2 * 96)),
        (View(2 * 100 * 96, 0, 9600, 0, 96), 100, [(96, 1, 100, 1, 2)], (9600, 96, 96, 9600)),
        ("bhsd", 101, [(96, 1, 100, 2, 2)], (101 * 96, 96, 100 * 96, 2 * 100 * 96)),
    ],
)
def test_tensor_maps_of_tokens_apart_end_where_a_class_does(layout, stride, sizes, strides):
    given = AttentionProblem(**{**vars(PLAIN), "layouts": Layouts(k=layout)})
    found = class_sizes(100, stride)
    assert len(found) == len(sizes) and sum(found) >= 100 // stride
    maps = tensor_map_fields(given, "k", PanelTile(128, 96, 256), 64, stride)
    for positions, size, fields in zip(found, sizes, maps, strict=True):
        assert fields == (*size, *(2 * n for n in strides), 32, 64, *[1] * 3, *[1] * 5, 0, 2, 3, 0)
        last = [positions - 1, min(stride, 100) - 1 if len(found) == 1 or positions == found[1] else 100 % stride - 1]
        assert last[0] * stride + last[1] < 100, "the last token of the largest class that uses it"


@pytest.mark.parametrize("together", [1, 2])
def test_entries_name_the_first_of_tokens_that_are_apart(together):
    keep = np.random.default_rng(0).random((150, 301)) < 0.02
    mask = BlockSparseMask.from_dense(keep, (64, 64), 3)
    (items, entries, keep_bits), _ = warp_specialized_operands(mask, problem(keep), H200, 132, together)
    seen = np.zeros(keep.shape, bool)
    rows, columns = np.arange(64)[:, None], np.arange(64)
    lane, i = np.arange(32)[:, None], np.arange(32)
    for item in items[items[:, Item.HEAD] == 0]:
        for first_key, part in entries[item[Item.BEGIN] * together : item[Item.END] * together]:
            block = np.ones((64, 64), bool)
            for m in range(4 if part >= 0 else 0):
                block[m * 16 + i % 4 // 2 * 8 + lane // 4, i // 4 * 8 + lane % 4 * 2 + i % 2] = (
                    keep_bits[part, m, lane, i // 32] >> (i % 32) & 1
                )
            row, column = item[Item.FIRST_ROW] + 3 * rows, first_key + 3 * columns
            there = np.broadcast_to((row < 150) & (column < 301), block.shape)
            assert not block[~there].any(), "nothing is kept of what is not there"
            row, column = (np.broadcast_to(x, block.shape)[there] for x in (row, column))
            seen[row, column] |= block[there]
    np.testing.assert_array_equal(seen, keep)


@pytest.mark.parametrize("dim, box, swizzle", [(64, 64, 3), (128, 64, 3), (96, 32, 2), (80, 16, 1), (16, 16, 1)])
def test_boxes_are_as_wide_as_the_widest_swizzle_that_divides_a_head(dim, box, swizzle):
    given = AttentionProblem(**{**vars(PLAIN), "v_head_dim": dim})
    (fields,) = tensor_map_fields(given, "v", PanelTile(64, dim, 128))
    assert fields[0] == dim and fields[7:9] == (box, 64) and fields[-3] == swizzle


@pytest.mark.parametrize("heads, unwritten", [(16, True), (17, False)])
def test_launches_share_a_workspace_only_if_no_item_is_taken_from_the_counter(heads, unwritten):
    """Two launches at once that take items from one counter leave each other's rows out."""
    given = AttentionProblem(1, heads, heads, 1024, 1024, 128, 128, "float16", 0.1)  # 8 rows of blocks a head
    target, config = parse_target("cuda -arch=sm_90a"), specialized.Config(128, 128, 2)
    operands = specialized.operands(given, config, target)
    ctas = Geometry(given, config).grid_size(H200)
    assert operands.workspace[0][0][0] == 1, "no row is split"
    assert (len(operands.constants[0]) <= ctas) == unwritten == operands.unwritten


def test_keep_bits_are_indexed_in_32_bits():
    bitmap = np.broadcast_to(np.zeros((1, 256), np.uint64), (2**22, 256))
    with pytest.raises(MaskError, match="4194304 partial blocks of 128x128 .* 32-bit"):
        lane_keep_bits(bitmap, 128, 128)
