"""MInference as a peer: its prediction, what its lists keep, and its kernels in this benchmark's place for them."""

import sys
import types

import pytest
import torch

from benchmarks import gpu_runtime_masks as bench
from benchmarks.peers.minference import VerticalSlash

CASE = bench.Case("vertical_slash", 384, 4, 2, 32)


def convert(lengths, columns, distances, length, height, width):
    """Each block of 64 queries has the blocks of 64 keys around its diagonals, and columns before all of those."""
    assert columns.dtype == distances.dtype == lengths.dtype == torch.int32
    assert bool((columns.diff(dim=-1) > 0).all()) and bool((distances.diff(dim=-1) < 0).all())
    sizes = (*columns.shape[:2], length // height)
    counts = [torch.zeros(sizes, dtype=torch.int32) for _ in range(2)]
    blocks, singles = (torch.full((*sizes, x.shape[-1]), -7, dtype=torch.int32) for x in (distances, columns))
    for batch, head, row in ((b, h, r) for b in range(sizes[0]) for h in range(sizes[1]) for r in range(sizes[2])):
        end = (row + 1) * height
        near = sorted({max(end - int(d), height) - width for d in distances[batch, head] if int(d) < end})
        starts = list(range(near[0], end, width))
        before = [int(c) for c in columns[batch, head] if int(c) < starts[0]]
        counts[0][batch, head, row], counts[1][batch, head, row] = len(starts), len(before)
        blocks[batch, head, row, : len(starts)] = torch.tensor(starts, dtype=torch.int32)
        singles[batch, head, row, : len(before)] = torch.tensor(before, dtype=torch.int32)
    return counts[0], blocks, counts[1], singles


def attend(q, k, v, lengths, block_count, block_offset, column_count, column_index, scale, height, width):
    out = torch.zeros_like(q)
    for batch, head, row in torch.cartesian_prod(*map(torch.arange, block_count.shape)).tolist():
        at = batch, head, row
        keys = [torch.arange(start, start + width) for start in block_offset[at][: block_count[at]].tolist()]
        keys = torch.cat([*keys, column_index[at][: column_count[at]].long()])
        rows = torch.arange(row * height, (row + 1) * height)
        keys = keys[keys < q.shape[2]]
        scores = q[batch, head, rows].float() @ k[batch, head, keys].float().T * scale
        scores = scores.masked_fill(keys > rows[:, None], float("-inf"))
        out[batch, head, rows] = (scores.softmax(-1) @ v[batch, head, keys].float()).to(q.dtype)
    return out


@pytest.fixture
def package(monkeypatch):
    """A package that stands for MInference's: its two functions by their meaning."""
    operators = types.ModuleType("minference.ops.pit_sparse_flash_attention_v2")
    operators.convert_vertical_slash_indexes, operators._triton_mixed_sparse_attention = convert, attend
    monkeypatch.setitem(sys.modules, "minference", types.ModuleType("minference"))
    parent = types.ModuleType("minference.ops")
    parent.pit_sparse_flash_attention_v2 = operators
    monkeypatch.setitem(sys.modules, "minference.ops", parent)
    monkeypatch.setitem(sys.modules, "minference.ops.pit_sparse_flash_attention_v2", operators)


def test_it_is_checked_under_what_it_keeps_itself(package):
    row = bench.times(CASE, "minference", "cpu")
    assert bench.is_right(row) and row["median_us"] > 0 and row["recall"] > 0.9
    assert "recall" in bench.line({"case": CASE.__dict__, "system": "minference", **row})


def test_the_prediction_is_that_of_the_last_queries(package):
    q, k, v = bench.inputs(CASE, "cpu")
    made = VerticalSlash(q, k, v, 12, 9, 4, 3)
    columns, distances = (x.flatten(0, 1) for x in made.predicted())
    length = CASE.length
    for head in range(CASE.q_heads):
        scores = q[0, head, -64:].float() @ k[0, head // 2].float().T * CASE.head_dim**-0.5
        i, j = torch.arange(length - 64, length)[:, None], torch.arange(length)
        weights = scores.masked_fill(j > i, float("-inf")).softmax(-1)
        by_column = weights.sum(0)
        by_distance = torch.zeros(length).scatter_add(0, (i - j).clamp(min=0).flatten(), weights.flatten())
        for found, sums, forced in ((columns[head], by_column, 4), (distances[head], by_distance, 3)):
            chosen = set(found.tolist())
            assert set(range(forced)) <= chosen and len(chosen) == len(found)
            # Scores in half precision may swap the last ones.
            others = [n for n in range(length) if n not in chosen]
            assert min(sums[n] for n in chosen if n >= forced) > 0.9 * sums[others].max()


def test_lists_keep_chosen_columns_and_diagonals(package):
    q, k, v = bench.inputs(CASE, "cpu")
    made = VerticalSlash(q, k, v, 12, 9, 4, 3)
    lists, rows = made.lists(), torch.tensor([0, 63, 64, 200, 383])
    kept = made.keep(lists, torch.arange(4), rows)
    columns, distances = (x.flatten(0, 1) for x in made.predicted())
    for head, n in ((head, n) for head in range(4) for n in range(len(rows))):
        row = int(rows[n])
        wanted = {c for c in columns[head].tolist() if c <= row} | {
            row - d for d in distances[head].tolist() if d <= row
        }
        assert wanted <= set(kept[head, n].nonzero().flatten().tolist()) and not kept[head, n, row + 1 :].any()


def test_lengths_that_need_padding_are_refused(package):
    q = torch.randn(1, 2, 100, 32)
    with pytest.raises(RuntimeError, match="length 100 is no multiple of 64"):
        VerticalSlash(q, q, q, 4, 4, 1, 1)


def test_without_the_package_it_is_an_import_error():
    q = torch.randn(1, 2, 128, 32)
    with pytest.raises(ImportError):
        VerticalSlash(q, q, q, 4, 4, 1, 1)
