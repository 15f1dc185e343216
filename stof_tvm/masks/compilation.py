"""From a lazy mask to arrays: block rows are walked in chunks, so that no q_len × kv_len array is ever held."""

import copy
import math
import reprlib

import numpy as np
import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import TILE, check_block, column_bits, count_bits, row_bits
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART, BlockLists, BlockSparseMask, block_state
from tir_kernels.masks.token_blocks import first_tokens

CHUNK_BLOCKS = 1 << 19  # block states held at a time
CHUNK_ELEMENTS = 1 << 20  # elements of rows held at a time
LOOKED_AT_TOGETHER = 64  # blocks of columns of which a pattern is first asked as of one
FEWEST_GROUPS = 8  # of them, for that to be worth it
CACHE_BYTES, CACHE_ENTRIES = 256 << 20, 4096
LARGEST_BLOCK = 1 << 12
LONGEST = 1 << 26  # far above any length; arrays of this length still fit in memory


def check_lengths(q_len: int, kv_len: int | None) -> tuple[int, int]:
    """Both lengths, kv_len defaulting to q_len; MaskError unless they are positive integers up to LONGEST."""
    kv_len = q_len if kv_len is None else kv_len
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise MaskError(f"{name}={reprlib.repr(length)} must be a positive integer")
        if length > LONGEST:
            raise MaskError(f"{name}={reprlib.repr(length)} must be at most {LONGEST}")
    return int(q_len), int(kv_len)


def compile_mask(
    mask, q_len: int, kv_len: int | None, block: tuple[int, int], token_stride: int = 1
) -> BlockSparseMask:
    """The mask in block-sparse storage; equal requests get the same object while the cache holds it."""
    block, token_stride = check_block(block), check_int("token_stride", token_stride, least=1, largest=LONGEST)
    if max(block) > LARGEST_BLOCK:
        raise MaskError(f"a block of {reprlib.repr(block)} is too large: its sides may be up to {LARGEST_BLOCK}")
    request = (*check_lengths(q_len, kv_len), block, token_stride)
    key = (mask.identity, *request)
    return _cache.get(key) or _cache.put(key, _compile(mask, *request))


def _compile(mask, q_len: int, kv_len: int, block: tuple[int, int], stride: int) -> BlockSparseMask:
    numbers, digests, patterns = {}, {}, []
    head_to_mask = np.zeros((mask.batch or 1, mask.heads or 1), np.int32)
    for (b, h), (identity, entry) in _entries(mask).items():
        if identity not in numbers:
            lists = BlockLists.stack(list(_walk(entry.bind(q_len, kv_len), q_len, kv_len, block, stride)))
            # Masks that are spelled differently may still keep the same.
            numbers[identity] = digests.setdefault(lists.digest(), len(patterns))
            if numbers[identity] == len(patterns):
                patterns.append(lists)
        head_to_mask[b, h] = numbers[identity]
    return BlockSparseMask.from_lists(q_len, kv_len, block, patterns, head_to_mask, stride)


def _entries(mask) -> dict:
    """(identity, mask) by (b, h), all identities taken before anything is evaluated."""
    entries = ((at, mask.at(*at)) for at in np.ndindex(mask.batch or 1, mask.heads or 1))
    return {at: (entry.identity, entry) for at, entry in entries}


def _walk(pattern, q_len, kv_len, block, stride):
    """Yield the block lists of the pattern, some block rows at a time.

    Blocks above 64 × 64 are put together from finer ones, most of which need no look at their elements.  Of a long
    sequence only the columns are looked at in which the pattern keeps anything of these rows.
    """
    block_m, block_n = block
    fine_m, fine_n = math.gcd(block_m, 64), math.gcd(block_n, 64)
    up, across = block_m // fine_m, block_n // fine_n
    rows = _Side(q_len, block_m, up, stride)
    columns = _Side(kv_len, block_n, across, stride)
    chunk_rows = up * max(1, CHUNK_BLOCKS // len(columns.first) // up)
    for start in range(0, len(rows.first), chunk_rows):
        some_rows = rows.part(slice(start, start + chunk_rows))
        some = _columns_with_any(pattern, some_rows, columns, across)
        state, bitmap = _classify(pattern, some_rows, columns if some is None else columns.part(some))
        if up * across > 1:
            state, bitmap = _merge(state, bitmap, up, across, fine_m // TILE, fine_n // TILE)
        lists = BlockLists.from_states(state, bitmap)
        if some is not None:
            number = (some[::across] // across).astype(np.int32)
            lists = lists._replace(full_col=number[lists.full_col], part_col=number[lists.part_col])
        yield lists


def _columns_with_any(pattern, rows: "_Side", columns: "_Side", across: int) -> np.ndarray | None:
    """The pieces of columns, in whole blocks of `across`, in which some of the rows may keep anything; None for all."""
    group = LOOKED_AT_TOGETHER * across
    if columns.stride > 1 or len(columns.first) < FEWEST_GROUPS * group:
        return None
    firsts = np.arange(0, len(columns.first), group)
    lasts = np.minimum(firsts + group, len(columns.first)) - 1
    top, bottom = rows.first[:1], rows.last.max(keepdims=True)
    state = pattern.blocks(top, bottom, columns.first[firsts], columns.last[lasts], columns.stride)
    keeps_any = state[0] != EMPTY
    keeps_any[0] |= not keeps_any.any()  # patterns are asked for one column at least
    return np.flatnonzero(np.repeat(keeps_any, lasts + 1 - firsts))


class _Side:
    """The blocks along one length, each cut into `pieces`: the first and last token of each piece, whose tokens are
    `stride` apart.

    `size` is the number of tokens of a whole piece, `count` how many of them lie within the length.  A piece past the
    length has a count of 0; its `first` and `last` are the last token, so that patterns can answer.
    """

    def __init__(self, length, block, pieces, stride):
        self.size, self.stride = block // pieces, stride
        inner = np.arange(pieces) * self.size * stride
        first = (first_tokens(length, block, stride)[:, None] + inner).reshape(-1)
        self.count = np.clip(-(-(length - first) // stride), 0, self.size)
        self.first = np.minimum(first, length - 1)
        self.last = self.first + np.maximum(self.count - 1, 0) * stride

    def part(self, some: slice | np.ndarray) -> "_Side":
        piece = copy.copy(self)
        piece.first, piece.last, piece.count = self.first[some], self.last[some], self.count[some]
        return piece

    def tokens(self, which) -> np.ndarray:
        """(n, size): the tokens of some blocks; past the end of a block its last token again."""
        return np.minimum(self.first[which, None] + np.arange(self.size) * self.stride, self.last[which, None])


def _classify(pattern, rows: _Side, columns: _Side):
    """(exact states of the blocks in some block rows, int8 (rows, columns); bitmaps of the partial ones)."""
    state = pattern.blocks(rows.first, rows.last, columns.first, columns.last, rows.stride)
    state[(rows.count == 0)[:, None] | (columns.count == 0)] = EMPTY
    ragged = (rows.count < rows.size)[:, None] | (columns.count < columns.size)
    state[(state == FULL) & ragged] = PART
    r, c = np.nonzero(state == PART)
    elements = rows.size * columns.size
    # One array, of which only what is written takes memory: many small ones among temporaries leave holes.
    bitmaps, filled = np.empty((len(r), elements // TILE**2), np.uint64), 0
    step = max(1, pattern.elements_at_once // elements)
    for k in range(0, len(r), step):
        some = r[k : k + step], c[k : k + step]
        bits = _bits(pattern, rows, columns, *some)
        found = block_state(count_bits(bits), elements)
        state[some] = found
        parts = bits[found == PART]
        bitmaps[filled : filled + len(parts)] = parts
        filled += len(parts)
    return state, bitmaps[:filled].copy() if 2 * filled < len(bitmaps) else bitmaps[:filled]


def _bits(pattern, rows: _Side, columns: _Side, r, c) -> np.ndarray:
    """uint64 (n, tiles): the bitmaps of the blocks (r[n], c[n]), 0 past the lengths."""
    bits = pattern.bits(rows.tokens(r), columns.tokens(c), rows.stride)
    if (rows.count[r] < rows.size).any() or (columns.count[c] < columns.size).any():
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


def dense_mask(mask, q_len: int, kv_len: int | None) -> torch.Tensor:
    """Boolean (q_len, kv_len), or (batch or 1, heads or 1, q_len, kv_len) where the mask depends on either."""
    q_len, kv_len = check_lengths(q_len, kv_len)
    out = np.empty((mask.batch or 1, mask.heads or 1, q_len, kv_len), np.bool_)
    done = {}
    for (b, h), (identity, entry) in _entries(mask).items():
        if identity in done:
            out[b, h] = out[done[identity]]
            continue
        done[identity] = b, h
        pattern = entry.bind(q_len, kv_len)
        j = np.arange(kv_len)[None]
        rows = max(1, CHUNK_ELEMENTS // kv_len)
        for first in range(0, q_len, rows):
            i = np.arange(first, min(first + rows, q_len))[None]
            out[b, h, i[0]] = pattern.keep(i, j)[0]
    return torch.from_numpy(out if mask.batch or mask.heads else out[0, 0])


def _size(compiled: BlockSparseMask) -> int:
    """Bytes of a compiled mask's arrays, and of the arrays that it derives from them on demand."""
    derived = compiled.load_row_ptr.nbytes + compiled.load_col_idx.nbytes
    return sum(array.nbytes for array in compiled.arrays.values()) + derived


_cache: BoundedCache[BlockSparseMask] = BoundedCache(_size, CACHE_BYTES, CACHE_ENTRIES)
