"""Shared-memory swizzle of the CUDA block-wise kernel, by enumeration."""

import pytest

from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, SharedTile

DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256]


@pytest.mark.parametrize("dim", DIMS)
def test_swizzle_places_every_chunk_once(dim):
    tile = SharedTile(64, dim, 128)
    offsets = {tile.offset(row, chunk) for row in range(64) for chunk in range(tile.chunks)}
    assert offsets == set(range(0, tile.size, CHUNK_BYTES))


@pytest.mark.parametrize("dim", DIMS)
def test_eight_rows_of_a_chunk_meet_every_bank(dim):
    """What one phase of ldmatrix reads: 8 rows × 16 bytes must be all 32 banks."""
    tile = SharedTile(64, dim, 128)
    for row in range(0, 64, 8):
        for chunk in range(tile.chunks):
            banks = {tile.offset(row + i, chunk) // CHUNK_BYTES % 8 for i in range(8)}
            assert len(banks) == 8


@pytest.mark.parametrize("dim", DIMS)
def test_step_walks_along_the_row(dim):
    tile = SharedTile(16, dim, 32)
    for row in range(16):
        for first in (0, 1):
            base = tile.offset(row, first)
            assert all(tile.step(base, c) == tile.offset(row, first + c) for c in range(0, tile.chunks - 1, 2))


@pytest.mark.parametrize("threads", [32, 64, 128, 256])
@pytest.mark.parametrize("dim", DIMS)
def test_passes_cover_the_tile_once(dim, threads):
    tile = SharedTile(32, dim, threads)
    written = []
    for thread in range(threads):
        row, chunk = thread // tile.threads_per_row, thread % tile.threads_per_row
        for i in range(tile.passes):
            if chunk < tile.chunks and row + i * tile.rows_per_pass < tile.rows:
                written.append(tile.pass_offset(tile.offset(row, chunk), i))
    assert sorted(written) == list(range(0, tile.size, CHUNK_BYTES))
