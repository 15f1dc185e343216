"""Items of many block rows, which a thread holds several of: the generated CUDA run on the CPU."""

import shutil

import numpy as np
import pytest

from tests.tir_kernels.attention.block_maps.emulated import emulated
from tests.tir_kernels.attention.cuda_emulator import aligned
from tir_kernels.attention.block_maps.order import CLASSES, HELD, MOST_CTAS, THREADS, Limits, grid_size, order
from tir_kernels.attention.block_maps.places import Place
from tir_kernels.attention.block_wise.work import split_counts

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
BLOCK_M, BLOCK_N, ROOM = 64, 64, 200
HEAD, FIRST_ROW, BEGIN, FULL, END, SPLITS, SPLIT, SLOT = range(8)


def fields(share):
    return dict(
        enumerate(
            (share.head, share.first_row, share.begin, share.full, share.end, share.splits, share.split)
            + (share.first_slot,)
        )
    )


@pytest.mark.parametrize(
    "heads, rows, groups, ctas", [(3, 7, 1, 1), (4, 600, 2, 3), (8, 2100, 4, 9), (10, 3400, 5, 12)]
)
@pytest.mark.parametrize("lengths", ["random", "equal", "few long ones"])
def test_every_row_once_and_long_ones_first(heads, rows, groups, ctas, lengths, tmp_path):
    n_rows, rng = heads * rows, np.random.default_rng(rows)
    assert (n_rows > HELD * THREADS) == (rows >= 2100)
    counts = rng.integers(0, ROOM // 4, n_rows)
    if lengths == "equal":
        counts[:] = 9
    if lengths == "few long ones":
        counts = np.where(rng.random(n_rows) < 0.002, ROOM, 1)
    partial = (counts * rng.random(n_rows)).astype(np.int64)
    limits = Limits(40, heads, rows, groups, ROOM)
    places = np.zeros((n_rows + 1, len(Place)), np.int32)
    places[:, Place.BEGIN] = np.arange(n_rows + 1) * ROOM
    arrays = {
        "places": aligned(places),
        "counts": aligned(np.stack([counts, partial], axis=1).astype(np.int32)),
        "entries": aligned(np.zeros((1, 2), np.int32)),
        "items": aligned(np.full((n_rows + limits.slots + 1, 8), 77, np.int32)),
    }
    kernel = emulated(order(BLOCK_M, BLOCK_N, limits, fields, SPLITS), tmp_path, "order")
    assert grid_size(limits) == ctas <= MOST_CTAS
    kernel(arrays, {}, rng.permutation(grid_size(limits)), THREADS, 0)
    items = arrays["items"]
    number = items[-1, 0]
    assert (items[number:, SPLITS] == 0).all()
    items = items[:number]
    row = items[:, HEAD] * rows + items[:, FIRST_ROW] // BLOCK_M
    np.testing.assert_array_equal(np.bincount(row, minlength=n_rows), split_counts(counts, BLOCK_N, limits.ctas))
    np.testing.assert_array_equal(np.bincount(row, items[:, END] - items[:, BEGIN], n_rows), counts)
    whole = items[:, SPLITS] == 1
    np.testing.assert_array_equal(items[whole, BEGIN], row[whole] * ROOM)
    np.testing.assert_array_equal(items[whole, FULL], (row * ROOM + partial[row])[whole])
    slots = items[~whole, SLOT] + items[~whole, SPLIT]
    assert sorted(slots) == list(range(len(slots))) and len(slots) <= limits.slots
    if lengths == "few long ones" and rows == 600:
        assert len(slots)
    group = items[:, HEAD] * groups // heads
    key = group * CLASSES - np.minimum(counts[row] * CLASSES // (ROOM + 1), CLASSES - 1)
    assert (np.diff(key) >= 0).all()
    # Rows of a class stay in their order, so that neighbours run at once; a warp that splits one may mix its own.
    if whole.all():
        assert (np.diff(row)[np.diff(key) == 0] > 0).all()
    assert whole.all() or rows == 7 or lengths == "few long ones"
