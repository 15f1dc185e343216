"""Bitmaps: 8×8 tiles of a boolean block as uint64, in the order that tensor-core accumulators want."""

import numpy as np

from tir_kernels.errors import MaskError

TILE = 8  # a uint64 holds 8×8 elements


def check_block(block) -> tuple[int, int]:
    """The block as two ints; MaskError unless both are positive multiples of 8."""
    try:
        block_m, block_n = block
    except (TypeError, ValueError):
        raise MaskError(f"block={block!r} must be a pair (height, width)") from None
    for name, n in (("height", block_m), ("width", block_n)):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < TILE or n % TILE:
            raise MaskError(f"block {name} {n!r} must be a positive multiple of {TILE}")
    return int(block_m), int(block_n)


def pack_bitmap(blocks: np.ndarray) -> np.ndarray:
    """Boolean (n, block_m, block_n) → uint64 (n, tiles), tiles column-major, bit 8*row+col of a tile."""
    n, block_m, block_n = blocks.shape
    octets = np.packbits(blocks, axis=2, bitorder="little")  # of a row's 8 elements in each tile
    tiles = octets.reshape(n, block_m // TILE, TILE, block_n // TILE).transpose(0, 3, 1, 2)
    words = np.ascontiguousarray(tiles).view("<u8")
    return words.reshape(n, (block_m // TILE) * (block_n // TILE)).astype(np.uint64, copy=False)


def row_bits(keep: np.ndarray) -> np.ndarray:
    """Boolean (n, block_m), the rows kept in each block → uint64 (n, block_m / 8): a tile of each tile row."""
    octets = np.where(keep, np.uint8(0xFF), np.uint8(0))
    return octets.view("<u8").astype(np.uint64, copy=False)


def column_bits(keep: np.ndarray) -> np.ndarray:
    """Boolean (n, block_n), the columns kept in each block → uint64 (n, block_n / 8): a tile of each tile column."""
    return np.packbits(keep, axis=1, bitorder="little") * np.uint64(0x0101010101010101)


def unpack_bitmap(bitmap: np.ndarray, block_m: int, block_n: int) -> np.ndarray:
    """The inverse of `pack_bitmap`: uint64 (n, tiles) → boolean (n, block_m, block_n)."""
    n = len(bitmap)
    octets = np.ascontiguousarray(bitmap.astype("<u8", copy=False)).view(np.uint8)
    tiles = np.unpackbits(octets, bitorder="little").reshape(n, block_n // TILE, block_m // TILE, TILE, TILE)
    return tiles.transpose(0, 2, 3, 1, 4).reshape(n, block_m, block_n).astype(np.bool_)


def count_bits(bitmap: np.ndarray) -> np.ndarray:
    """Kept elements of each block: uint64 (n, tiles) → int64 (n,)."""
    return np.bitwise_count(bitmap).sum(axis=1, dtype=np.int64)
