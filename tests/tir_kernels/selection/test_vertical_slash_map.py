"""Vertical and slash positions to a block map: the generated CUDA run on the CPU, beside the pairs themselves."""

import shutil

import numpy as np
import pytest

from tests.tir_kernels.attention.block_maps.emulated import emulated
from tests.tir_kernels.attention.cuda_emulator import aligned
from tir_kernels.selection.vertical_slash_map import THREADS, takes, tile_of, vertical_slash_map

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
BLOCKS = [(32, 32), (128, 32), (64, 128), (16, 32), (48, 32), (16, 160)]


def expected(columns, distances, length, block):
    """Bool (query blocks, key blocks): those with a pair j <= i of a column or a distance."""
    i, j = np.arange(length)[:, None], np.arange(length)
    is_column, is_distance = np.zeros(length, bool), np.zeros(length, bool)
    is_column[columns], is_distance[distances] = True, True
    kept = (j <= i) & (is_column[None] | is_distance[np.maximum(i - j, 0)])
    for axis, size in enumerate(block):
        kept = np.logical_or.reduceat(kept, np.arange(0, length, size), axis)
    return kept


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """A function of positions and rows of blocks to what a kernel makes of them; CTAs in any order."""
    folder, kernels = tmp_path_factory.mktemp("vertical_slash_map"), {}

    def run(columns, distances, sinks, window, first, end, length, block):
        if block not in kernels:
            kernels[block] = emulated(vertical_slash_map(block), folder, "x".join(map(str, block)))
        kernel, heads, width = kernels[block], len(columns), -(-length // block[1])
        kept = aligned(np.full((heads, end - first, width), 77, np.uint8))
        rows, wide = tile_of(block)
        across = -(-(width + (3 if width % 4 else 0)) // wide)
        numbers = {"heads": heads, "n": columns.shape[1], "m": distances.shape[1], "sinks": sinks, "window": window}
        numbers |= {"first": first, "length": length, "map_rows": end - first, "map_columns": width}
        arrays = {"columns": aligned(columns), "distances": aligned(distances), "kept_bytes": kept, "kept_words": kept}
        # What the host computes for all CTAs: how many tiles lie side by side.
        names = {name.removesuffix("_ptr") for name in kernel.parameters}
        numbers |= dict.fromkeys(names - {*numbers, *arrays}, across)
        kernel(arrays, numbers, range(heads * across * -(-(end - first) // rows))[::-1], THREADS, 0)
        return kept

    return run


def positions(rng, length, n, forced):
    """int64 (2, n): places behind the forced ones, less their number, and some that are none."""
    found = np.stack([rng.choice(np.arange(length - forced), n) for _ in range(2)])
    found[:, 1::5] = -1
    return found


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("length", [1, 100, 160, 1000])
def test_maps(mapped, block, length):
    rng = np.random.default_rng(length)
    for sinks, window, n in ((0, 0, 1), (0, 0, 3), (min(5, length - 1), min(40, length - 1), 4)):
        columns, distances = (positions(rng, length, n, forced) for forced in (sinks, window))
        rows = -(-length // block[0])
        found = mapped(columns, distances, sinks, window, 0, rows, length, block)
        for head in range(2):
            own = [
                np.r_[np.arange(forced), x[head][x[head] >= 0] + forced]
                for x, forced in ((columns, sinks), (distances, window))
            ]
            np.testing.assert_array_equal(found[head], expected(*own, length, block), err_msg=f"{own}")


@pytest.mark.parametrize("block, length", [((32, 32), 5000), ((128, 32), 17000), ((16, 32), 2500), ((32, 16), 8300)])
def test_sections_and_tiles(mapped, block, length):
    """Maps of several tiles, and some rows of them, whose first row isn't a tile's."""
    rng = np.random.default_rng(length)
    columns, distances = positions(rng, length, 300, 3), positions(rng, length, 9, 20)
    rows, none = -(-length // block[0]), np.full((2, 1), -1)
    whole = mapped(columns, distances, 3, 20, 0, rows, length, block)
    assert whole.max() == 1
    for first, end in ((0, 1), (rows // 3, rows // 2), (rows - 3, rows)):
        np.testing.assert_array_equal(mapped(columns, distances, 3, 20, first, end, length, block), whole[:, first:end])
    if length < 9000:
        own = [np.r_[np.arange(f), x[1][x[1] >= 0] + f] for x, f in ((columns, 3), (distances, 20))]
        np.testing.assert_array_equal(whole[1], expected(*own, length, block))
    assert not mapped(none, none, 0, 0, 0, rows, length, block).any()


def test_every_position(mapped):
    block, length = (48, 32), 230
    none = np.full((length, 1), -1)
    each = np.arange(length)[:, None]
    columns = mapped(each, none, 0, 0, 0, 5, length, block)
    distances = mapped(none, each, 0, 0, 0, 5, length, block)
    for place in range(length):
        np.testing.assert_array_equal(columns[place], expected([place], [], length, block), err_msg=str(place))
        np.testing.assert_array_equal(distances[place], expected([], [place], length, block), err_msg=str(place))


def test_tiles_have_room():
    assert takes((16, 8192)) and not takes((16, 16384)) and takes((16 * 8192, 16)) and not takes((16 * 8193, 32))
    assert tile_of((128, 128)) == (128, 512) and tile_of((16, 8192)) == (128, 16) and tile_of((16 * 8192, 16))[0] == 1


@pytest.mark.parametrize("block", [(16, 4096), (4096, 16), (16 * 1024, 32)])
def test_blocks_of_unlike_sides(mapped, block):
    rng = np.random.default_rng(0)
    length = 9000
    columns, distances = positions(rng, length, 2, 0), positions(rng, length, 2, 0)
    rows = -(-length // block[0])
    found = mapped(columns, distances, 0, 0, 0, rows, length, block)
    own = [x[1][x[1] >= 0] for x in (columns, distances)]
    np.testing.assert_array_equal(found[1], expected(*own, length, block))
