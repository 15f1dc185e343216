"""From a pattern to block lists: block rows are walked in chunks, so that no q_len × kv_len array is ever held."""

import math
from collections.abc import Iterator

import numpy as np

from stof_tvm.masks.walking.side import Side
from tir_kernels.masks.bitmap import TILE, column_bits, count_bits, row_bits
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART, BlockLists, block_state

CHUNK_BLOCKS = 1 << 19  # block states held at a time
COARSE = 64  # tokens along the sides of blocks that a pattern of a long sequence is first asked for
FEWEST_COARSE = 256  # of them along the keys, for that to be worth it
COARSE_TOGETHER = 32  # of them along the keys that are first asked for as one
MOST_PARTIAL = 1 / 16  # of coarse blocks, beyond which the fine ones are asked for


def walk(pattern, q_len: int, kv_len: int, block: tuple[int, int], stride: int) -> Iterator[BlockLists]:
    """Yield the block lists of the pattern, some block rows at a time.

    Of a long sequence most blocks are in coarse ones that keep nothing, or everything: it is asked for these first.
    """
    rows, columns = Side.of(q_len, block[0], stride), Side.of(kv_len, block[1], stride)
    if stride > 1 or len(columns) * block[1] < FEWEST_COARSE * COARSE:
        yield from _finely(pattern, rows, columns)
        return
    up, across = (max(1, COARSE // size) for size in block)
    at_once = up * max(1, CHUNK_BLOCKS * across // len(columns))
    for start in range(0, len(rows), at_once):
        some_rows = rows.part(slice(start, start + at_once))
        number = _columns_with_any(pattern, some_rows, columns, COARSE_TOGETHER * across)
        some_columns = columns.part(number)
        lists = _coarsely(pattern, some_rows, some_columns, up, across)
        for some in _finely(pattern, some_rows, some_columns) if lists is None else [lists]:
            yield some._replace(full_col=number[some.full_col], part_col=number[some.part_col])


def _columns_with_any(pattern, rows: Side, columns: Side, together: int) -> np.ndarray:
    """int32: the block columns, `together` at a time, in which some of the rows may keep anything."""
    groups = columns.joined(together)
    state = pattern.blocks(rows.first[:1], rows.last[-1:], groups.first, groups.last, 1)
    keeps_any = state[0] != EMPTY
    keeps_any[0] |= not keeps_any.any()  # patterns are asked for one column at least
    return np.flatnonzero(np.repeat(keeps_any, together)[: len(columns)]).astype(np.int32)


def _coarsely(pattern, rows: Side, columns: Side, up: int, across: int) -> BlockLists | None:
    """The lists of some block rows by blocks of up × across; None where too many of these are partial.

    Of partial ones all elements are looked at.
    """
    tall, wide = rows.joined(up), columns.joined(across)
    state = pattern.blocks(tall.first, tall.last, wide.first, wide.last, 1)
    state[(state == FULL) & (tall.is_ragged[:, None] | wide.is_ragged)] = PART
    if np.count_nonzero(state == PART) > MOST_PARTIAL * state.size:
        return None
    r, c = np.nonzero(state)
    # States of the blocks within coarse ones: (coarse blocks, up, across).
    inside = np.repeat(state[r, c], up * across).reshape(-1, up, across)
    r, c = r[:, None, None] * up + np.arange(up)[:, None], c[:, None, None] * across + np.arange(across)
    r, c = np.broadcast_arrays(r, c)
    inside[(r >= len(rows)) | (c >= len(columns))] = EMPTY
    part = inside == PART
    inside[part], bitmap = _looked_at(pattern, rows, columns, r[part], c[part])
    kept = inside != EMPTY
    r, c, inside = r[kept], c[kept], inside[kept]
    number = np.cumsum(inside == PART) - 1
    is_short = len(rows) <= np.iinfo(np.uint16).max
    order = np.argsort(r.astype(np.uint16) if is_short else r, kind="stable")  # of 16 bits, a radix sort
    r, c, inside, number = r[order], c[order].astype(np.int32), inside[order], number[order]
    full, part = inside == FULL, inside == PART
    counts = [np.bincount(r[some], minlength=len(rows)) for some in (full, part)]
    return BlockLists(counts[0], c[full], counts[1], c[part], bitmap[number[part]])


def _finely(pattern, rows: Side, columns: Side) -> Iterator[BlockLists]:
    """Yield the lists of some block rows, all of whose blocks are asked for.

    Blocks above 64 × 64 are put together from finer ones, most of which need no look at their elements.
    """
    up, across = (side.size // math.gcd(side.size, 64) for side in (rows, columns))
    pieces = columns.cut(across)
    at_once = max(1, CHUNK_BLOCKS // len(pieces) // up)
    for start in range(0, len(rows), at_once):
        some = rows.part(slice(start, start + at_once)).cut(up)
        state, bitmap = _classify(pattern, some, pieces)
        if up * across > 1:
            state, bitmap = _merge(state, bitmap, up, across, some.size // TILE, pieces.size // TILE)
        yield BlockLists.from_states(state, bitmap)


def _classify(pattern, rows: Side, columns: Side):
    """(exact states of the blocks in some block rows, int8 (rows, columns); bitmaps of the partial ones)."""
    state = pattern.blocks(rows.first, rows.last, columns.first, columns.last, rows.stride)
    state[(rows.count == 0)[:, None] | (columns.count == 0)] = EMPTY
    state[(state == FULL) & (rows.is_ragged[:, None] | columns.is_ragged)] = PART
    r, c = np.nonzero(state == PART)
    state[r, c], bitmaps = _looked_at(pattern, rows, columns, r, c)
    return state, bitmaps


def _looked_at(pattern, rows: Side, columns: Side, r, c):
    """(the states of the blocks (r[n], c[n]) by their elements; bitmaps of the partial ones)."""
    elements = rows.size * columns.size
    state = np.empty(len(r), np.int8)
    # One array, of which only what is written takes memory: many small ones among temporaries leave holes.
    bitmaps, filled = np.empty((len(r), elements // TILE**2), np.uint64), 0
    step = max(1, pattern.elements_at_once // elements)
    for k in range(0, len(r), step):
        bits = _bits(pattern, rows, columns, r[k : k + step], c[k : k + step])
        state[k : k + step] = found = block_state(count_bits(bits), elements)
        is_part = found == PART
        parts = bits if is_part.all() else bits[is_part]
        bitmaps[filled : filled + len(parts)] = parts
        filled += len(parts)
    return state, bitmaps[:filled].copy() if 2 * filled < len(bitmaps) else bitmaps[:filled]


def _bits(pattern, rows: Side, columns: Side, r, c) -> np.ndarray:
    """uint64 (n, tiles): the bitmaps of the blocks (r[n], c[n]), 0 past the lengths."""
    bits = pattern.bits(rows.tokens(r), columns.tokens(c), rows.stride)
    if rows.is_ragged[r].any() or columns.is_ragged[c].any():
        inside_rows = row_bits(np.arange(rows.size) < rows.count[r, None])
        inside_columns = column_bits(np.arange(columns.size) < columns.count[c, None])
        bits &= (inside_columns[:, :, None] & inside_rows[:, None, :]).reshape(bits.shape)
    return bits


def _merge(state, bitmap, up, across, tiles_m, tiles_n):
    """States and bitmaps of blocks that each join up × across finer ones; these have tiles_m × tiles_n tiles."""
    rows, columns = -(-state.shape[0] // up), -(-state.shape[1] // across)
    fine = np.full((rows * up, columns * across), EMPTY)
    fine[: state.shape[0], : state.shape[1]] = state
    number = (np.cumsum(fine == PART) - 1).reshape(rows, up, columns, across)
    fine = fine.reshape(rows, up, columns, across)
    merged = (fine != EMPTY).any(axis=(1, 3)).astype(np.int8) + (fine == FULL).all(axis=(1, 3))
    r, c = np.nonzero(merged == PART)
    inner, number = fine[r, :, c], number[r, :, c]
    # Tiles are column-major in the block, so a finer block's tiles are a strided part of them.
    tiles = np.zeros((len(r), across, tiles_n, up, tiles_m), np.uint64)
    k, y, x = np.nonzero(inner == FULL)
    tiles[k, x, :, y] = np.iinfo(np.uint64).max
    k, y, x = np.nonzero(inner == PART)
    tiles[k, x, :, y] = bitmap[number[k, y, x]].reshape(-1, tiles_n, tiles_m)
    return merged, tiles.reshape(len(r), across * tiles_n * up * tiles_m)
