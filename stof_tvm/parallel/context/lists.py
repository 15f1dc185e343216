"""What the lists of a stored mask say of single tokens: which keys rows need, and where no pair crosses a cut."""

import numpy as np

from tir_kernels.masks.bitmap import TILE
from tir_kernels.masks.block_sparse import BlockSparseMask

BLOCK = 64  # tokens of a block, both ways
_LOWEST = np.array([8, *((x & -x).bit_length() - 1 for x in range(1, 256))], np.int64)  # lowest set bit of a byte
_HIGHEST = np.array([x.bit_length() - 1 for x in range(256)], np.int64)


class PatternLists:
    """The lists of one pattern of a square mask, stored in blocks of `BLOCK` × `BLOCK`.

    Attributes
    ----------
    listed : int64 (block rows,)
        Blocks of each block row that keep something.
    """

    def __init__(self, stored: BlockSparseMask, pattern: int):
        assert (stored.block_m, stored.block_n, stored.token_stride) == (BLOCK, BLOCK, 1)
        assert stored.q_len == stored.kv_len
        self.length, self.rows = stored.q_len, stored.n_block_rows
        full, part = (
            ptr[pattern * self.rows : (pattern + 1) * self.rows + 1].astype(np.int64)
            for ptr in (stored.full_row_ptr, stored.part_row_ptr)
        )
        self.listed = np.diff(full) + np.diff(part)
        self.full_row, self.part_row = (
            np.repeat(np.arange(self.rows, dtype=np.int32), np.diff(ptr)) for ptr in (full, part)
        )
        self.full_col = stored.full_col_idx[full[0] : full[-1]]
        self.part_col = stored.part_col_idx[part[0] : part[-1]]
        bitmap = np.ascontiguousarray(stored.bitmap[part[0] : part[-1]].astype("<u8", copy=False))
        # (blocks, columns of tiles, rows): a byte has the 8 columns of a row in a tile, the first one lowest.
        self.bytes = bitmap.view(np.uint8).reshape(len(bitmap), BLOCK // TILE, BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists, without the bitmaps, which are the stored mask's where it is little-endian."""
        arrays = self.listed, self.full_row, self.part_row, self.full_col, self.part_col
        return sum(array.nbytes for array in arrays)

    def needed(self, owner: np.ndarray, ranks: int) -> np.ndarray:
        """Bits of the keys that each rank's rows keep, little-endian: uint8 (ranks, block columns, BLOCK / 8).

        `owner` is int (length,): the rank of each row.
        """
        found = np.zeros((ranks, self.rows, BLOCK // TILE), np.uint8)
        first = owner[::BLOCK]
        mixed = _of_blocks(owner != np.repeat(first, BLOCK)[: len(owner)], np.any)
        alone = ~mixed[self.full_row]
        found[first[self.full_row[alone]], self.full_col[alone]] = 0xFF
        alone = ~mixed[self.part_row]
        self._add(found, first[self.part_row[alone]], self.part_col[alone], self.bytes[alone])
        for row in np.flatnonzero(mixed):
            owners = owner[row * BLOCK : (row + 1) * BLOCK]
            full, part = (slice(*np.searchsorted(rows, [row, row + 1])) for rows in (self.full_row, self.part_row))
            for rank in np.unique(owners):
                mine = np.zeros(BLOCK, np.uint8)
                mine[: len(owners)][owners == rank] = 0xFF
                found[rank, self.full_col[full]] = 0xFF
                columns = self.part_col[part]
                self._add(found, np.full(len(columns), rank), columns, self.bytes[part] & mine)
        return found

    def _add(self, found, ranks, columns, rows) -> None:
        """Add the columns that any row of partial blocks keeps to the ranks' bits."""
        if len(columns):
            key = ranks.astype(np.int64) * self.rows + columns
            order = np.argsort(key, kind="stable")
            key, bits = key[order], np.bitwise_or.reduce(rows, axis=2)[order]
            starts = np.flatnonzero(np.diff(key, prepend=-1))
            flat = found.reshape(-1, BLOCK // TILE)
            flat[key[starts]] |= np.bitwise_or.reduceat(bits, starts, axis=0)

    def rows_that_keep(self, columns: np.ndarray) -> np.ndarray:
        """Boolean (length,): the rows that keep any of the columns, uint8 (block columns, BLOCK / 8) of bits."""
        found = np.zeros((self.rows, BLOCK), np.bool_)
        some = np.asarray(columns.any(axis=1))
        found[self.full_row[some[self.full_col]]] = True
        for k in np.array_split(np.flatnonzero(some[self.part_col]), 1 + len(self.part_col) // 65536):
            keeps = (self.bytes[k] & columns[self.part_col[k]][:, :, None]).any(axis=1)
            np.logical_or.at(found, self.part_row[k], keeps)
        return found.reshape(-1)[: self.length]

    def crossings(self) -> np.ndarray:
        """int64 (length,): how many rows keep a pair on both sides of the cut before each token, at least.

        0 says that nothing crosses; a row that keeps nothing crosses none.
        """
        at = np.arange(self.rows * BLOCK).reshape(self.rows, BLOCK)
        low, high = at.copy(), at.copy()
        # Rows ascend, and the columns of each.
        begins = np.flatnonzero(np.diff(self.full_row, prepend=-1))
        ends = np.append(begins, len(self.full_row))[1:] - 1
        some, first, last = self.full_row[begins], self.full_col[begins], self.full_col[ends]
        low[some] = np.minimum(low[some], first[:, None].astype(np.int64) * BLOCK)
        high[some] = np.maximum(high[some], last[:, None].astype(np.int64) * BLOCK + BLOCK - 1)
        tile = np.arange(BLOCK // TILE)[None, :, None] * TILE
        for k in np.array_split(np.arange(len(self.part_col)), 1 + len(self.part_col) // 16384):
            bits, start = self.bytes[k], self.part_col[k].astype(np.int64)[:, None] * BLOCK
            empty = bits == 0
            least = start + np.where(empty, BLOCK, tile + _LOWEST[bits]).min(axis=1)
            most = start + np.where(empty, -1, tile + _HIGHEST[bits]).max(axis=1)
            none = empty.all(axis=1)
            np.minimum.at(low, self.part_row[k], np.where(none, self.length, least))
            np.maximum.at(high, self.part_row[k], np.where(none, -1, most))
        low, high = low.reshape(-1)[: self.length], high.reshape(-1)[: self.length]
        change = np.bincount(low + 1, minlength=self.length + 2) - np.bincount(high + 1, minlength=self.length + 2)
        return np.cumsum(change)[: self.length]


def packed(tokens: np.ndarray) -> np.ndarray:
    """Bits of some tokens, boolean (…, length), as `needed` has them: uint8 (…, block columns, BLOCK / 8)."""
    length = tokens.shape[-1]
    columns = -(-length // BLOCK)
    padded = np.zeros((*tokens.shape[:-1], columns * BLOCK), np.bool_)
    padded[..., :length] = tokens
    return np.packbits(padded, axis=-1, bitorder="little").reshape(*tokens.shape[:-1], columns, BLOCK // TILE)


def unpacked(bits: np.ndarray, length: int) -> np.ndarray:
    """The inverse of `packed`: boolean (…, length)."""
    flat = bits.reshape(*bits.shape[:-2], -1)
    return np.unpackbits(flat, axis=-1, bitorder="little", count=length).astype(np.bool_)


def _of_blocks(tokens: np.ndarray, combine) -> np.ndarray:
    """Each block's tokens combined; the last block is filled up with zeros."""
    padded = np.zeros(-(-len(tokens) // BLOCK) * BLOCK, tokens.dtype)
    padded[: len(tokens)] = tokens
    return combine(padded.reshape(-1, BLOCK), axis=1)
