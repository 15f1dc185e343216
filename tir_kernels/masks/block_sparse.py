"""The mask as the kernels read it: block-CSR over blocks, one uint64 bitmap for every 8×8 tile of a partial block."""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tir_kernels.errors import MaskError
from tir_kernels.masks import validation as mask_validation
from tir_kernels.masks.bitmap import check_block, count_bits, pack_bitmap, unpack_bitmap
from tir_kernels.masks.token_blocks import n_token_blocks, positions

EMPTY, PART, FULL = np.int8(0), np.int8(1), np.int8(2)


class BlockLists(NamedTuple):
    """Some block rows of one pattern, top to bottom: the lists of each row, and the bitmaps of the partial blocks."""

    full_count: np.ndarray  # (rows,), full blocks of each block row
    full_col: np.ndarray  # (full blocks,), ascending in each block row
    part_count: np.ndarray  # (rows,)
    part_col: np.ndarray  # (partial blocks,)
    bitmap: np.ndarray  # uint64 (partial blocks, tiles)

    @staticmethod
    def from_states(state: np.ndarray, bitmap: np.ndarray) -> "BlockLists":
        """The lists for int8 states (rows, n_block_cols), each EMPTY, PART or FULL.

        `bitmap` holds the bitmaps of the partial blocks, row by row.
        """
        full, part = state == FULL, state == PART
        columns = (np.nonzero(listed)[1].astype(np.int32) for listed in (full, part))
        full_col, part_col = columns
        return BlockLists(full.sum(axis=1), full_col, part.sum(axis=1), part_col, bitmap)

    @staticmethod
    def stack(pieces: "list[BlockLists]") -> "BlockLists":
        """The pieces stacked along their rows.  `pieces` is emptied one by one, so that no bitmap is held twice."""
        if len(pieces) == 1:
            return pieces.pop()
        sizes = [sum(map(len, arrays)) for arrays in zip(*pieces, strict=True)]
        stacked = BlockLists(*(np.empty((n, *a.shape[1:]), a.dtype) for n, a in zip(sizes, pieces[0], strict=True)))
        while pieces:  # from the last piece to the first: each size becomes the end of the piece before
            for k, array in enumerate(pieces.pop()):
                stacked[k][sizes[k] - len(array) : sizes[k]] = array
                sizes[k] -= len(array)
        return stacked

    def digest(self) -> bytes:
        """SHA-256 of the contents; equal patterns of equal block grids have equal digests."""
        sha = hashlib.sha256()
        for array in self:
            sha.update(np.ascontiguousarray(array).data)
        return sha.digest()


@dataclass(frozen=True, eq=False)
class BlockSparseMask:
    """Two-level storage of one or several (q_len, kv_len) boolean patterns (paper, section on mask storage).

    The level above: each pattern is cut into blocks of block_m × block_n.  A block is *empty* (keeps nothing, is in no
    list), *full* (keeps everything, needs no masking) or *partial*.  Three block-CSR lists with ascending columns hold
    the full blocks, the partial ones (`part_…`) and both together (`load_…`).  Row `p * n_block_rows + r` is block row
    r of pattern p.

    The level below: a partial block's bitmap has one uint64 for each 8×8 tile, tiles in column-major order; bit
    `8 * (row % 8) + col % 8`, least significant first, is 1 where (row, col) is kept.  Elements past q_len or
    kv_len are 0, so a ragged edge makes its blocks partial blocks.  The README.md of tir_kernels draws it.

    The arrays are shared between all users of an equal mask: read them, never write them.

    Attributes
    ----------
    q_len, kv_len, block_m, block_n : int
        Lengths of the pattern, and block height and width (multiples of 8).
    full_row_ptr, part_row_ptr, load_row_ptr : int32 (n_patterns * n_block_rows + 1,)
        Prefix sums of the number of blocks in each block row.
    full_col_idx, part_col_idx, load_col_idx : int32 (number of blocks,)
        Block columns, ascending in each block row.
    bitmap : uint64 (number of partial blocks, tiles_m * tiles_n)
        Tile (tr, tc) of a partial block is entry `tc * tiles_m + tr`, with tiles_m = block_m / 8.
    head_to_mask : int32 (1 or batch, 1 or q_heads)
        The pattern of each batch entry and head; a 1 stands for all of them.
    token_stride : int
        The distance between neighbouring tokens of a block (token_blocks.py); 1 is the usual order.
    """

    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    full_row_ptr: np.ndarray
    full_col_idx: np.ndarray
    part_row_ptr: np.ndarray
    part_col_idx: np.ndarray
    load_row_ptr: np.ndarray
    load_col_idx: np.ndarray
    bitmap: np.ndarray
    head_to_mask: np.ndarray
    token_stride: int = 1

    # -- construction -------------------------------------------------------------------------------------------

    @staticmethod
    def from_dense(keep: np.ndarray, block: tuple[int, int] = (64, 64), token_stride: int = 1) -> "BlockSparseMask":
        """Compress a boolean array of shape (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len).

        Equal patterns are stored once.  Raises MaskError for another rank or dtype, a length of 0, or a block size
        that is not a positive multiple of 8.
        """
        keep = np.asarray(keep)
        if keep.dtype != np.bool_:
            raise MaskError(f"a dense mask must be boolean, got {keep.dtype}")
        if keep.ndim not in (2, 3, 4) or 0 in keep.shape:
            raise MaskError(f"a dense mask has 2 to 4 dimensions, none of them 0, got shape {keep.shape}")
        block_m, block_n = check_block(block)
        grid = keep.reshape((1,) * (4 - keep.ndim) + keep.shape)
        q_len, kv_len = grid.shape[2:]
        rows, cols = n_token_blocks(q_len, block_m, token_stride), n_token_blocks(kv_len, block_n, token_stride)
        row_at = positions(q_len, block_m, token_stride)[:, None]
        column_at = positions(kv_len, block_n, token_stride)
        patterns, ids = [], {}
        head_to_mask = np.zeros(grid.shape[:2], np.int32)
        for b, h in np.ndindex(*grid.shape[:2]):
            key = hashlib.sha256(np.packbits(grid[b, h]).data).digest()
            if key not in ids:
                ids[key] = len(patterns)
                padded = np.zeros((rows * block_m, cols * block_n), np.bool_)
                padded[row_at, column_at] = grid[b, h]
                blocks = padded.reshape(rows, block_m, cols, block_n).swapaxes(1, 2)
                state = block_state(blocks.sum(axis=(2, 3), dtype=np.int64), block_m * block_n)
                patterns.append(BlockLists.from_states(state, pack_bitmap(blocks[state == PART])))
            head_to_mask[b, h] = ids[key]
        return BlockSparseMask.from_lists(q_len, kv_len, (block_m, block_n), patterns, head_to_mask, token_stride)

    @staticmethod
    def keep_all(q_len: int, kv_len: int, block: tuple[int, int] = (64, 64)) -> "BlockSparseMask":
        """The mask that keeps everything: full blocks, and partial blocks along ragged edges."""
        block_m, block_n = check_block(block)
        in_row = np.minimum(q_len - np.arange(0, q_len, block_m), block_m)
        in_col = np.minimum(kv_len - np.arange(0, kv_len, block_n), block_n)
        state = block_state(np.multiply.outer(in_row, in_col), block_m * block_n)
        rows, cols = np.nonzero(state == PART)
        inside_m = np.arange(block_m) < in_row[rows, None]
        inside_n = np.arange(block_n) < in_col[cols, None]
        bitmap = pack_bitmap(inside_m[:, :, None] & inside_n[:, None, :])
        lists = BlockLists.from_states(state, bitmap)
        return BlockSparseMask.from_lists(q_len, kv_len, (block_m, block_n), [lists], np.zeros((1, 1), np.int32))

    @staticmethod
    def from_lists(
        q_len, kv_len, block, patterns: list[BlockLists], head_to_mask, token_stride: int = 1
    ) -> "BlockSparseMask":
        """Assemble a mask from the lists of each pattern; `block` is (block_m, block_n)."""
        lists = BlockLists.stack(patterns)
        rows = np.arange(len(lists.full_count))
        n_block_cols = n_token_blocks(kv_len, block[1], token_stride)
        keys = [np.repeat(rows, lists.full_count) * n_block_cols + lists.full_col]
        keys.append(np.repeat(rows, lists.part_count) * n_block_cols + lists.part_col)
        load_col_idx = (np.sort(np.concatenate(keys)) % n_block_cols).astype(np.int32)
        return BlockSparseMask(
            q_len,
            kv_len,
            block[0],
            block[1],
            _row_ptr(lists.full_count),
            lists.full_col.astype(np.int32, copy=False),
            _row_ptr(lists.part_count),
            lists.part_col.astype(np.int32, copy=False),
            _row_ptr(lists.full_count + lists.part_count),
            load_col_idx,
            lists.bitmap,
            np.asarray(head_to_mask, np.int32),
            token_stride,
        )

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, np.ndarray)}

    @property
    def n_block_rows(self) -> int:
        """Number of block rows of one pattern."""
        return n_token_blocks(self.q_len, self.block_m, self.token_stride)

    @property
    def n_block_cols(self) -> int:
        """Number of block columns of one pattern."""
        return n_token_blocks(self.kv_len, self.block_n, self.token_stride)

    @property
    def n_patterns(self) -> int:
        """Number of stored patterns; heads may share one."""
        return (len(self.load_row_ptr) - 1) // self.n_block_rows

    @property
    def is_empty(self) -> bool:
        """Whether no pattern keeps anything."""
        return len(self.load_col_idx) == 0

    @property
    def block_density(self) -> float:
        """Listed blocks over all blocks, averaged over patterns."""
        return len(self.load_col_idx) / (self.n_patterns * self.n_block_rows * self.n_block_cols)

    @cached_property
    def density(self) -> float:
        """Kept elements over all elements, averaged over batch entries and heads."""
        first_rows = np.arange(self.n_patterns + 1) * self.n_block_rows
        full = np.diff(self.full_row_ptr[first_rows]).astype(np.int64) * self.block_m * self.block_n
        bits = np.concatenate([[0], np.cumsum(count_bits(self.bitmap))])
        kept = full + np.diff(bits[self.part_row_ptr[first_rows]])
        return float(kept[self.head_to_mask].mean()) / (self.q_len * self.kv_len)

    @cached_property
    def row_order(self) -> np.ndarray:
        """int32 (n_patterns * n_block_rows,): block rows of each pattern, most listed blocks first.

        A kernel that starts block rows in this order does not finish on one long row (global tokens).
        """
        counts = np.diff(self.load_row_ptr).reshape(self.n_patterns, self.n_block_rows)
        return np.argsort(-counts, axis=1, kind="stable").astype(np.int32).reshape(-1)

    @cached_property
    def load_part_idx(self) -> np.ndarray:
        """int32, parallel to load_col_idx: the block's row in `bitmap`, or -1 where the block is full."""
        rows = np.repeat(np.arange(len(self.load_row_ptr) - 1), np.diff(self.load_row_ptr))
        part_rows = np.repeat(np.arange(len(self.part_row_ptr) - 1), np.diff(self.part_row_ptr))
        load_key = rows.astype(np.int64) * self.n_block_cols + self.load_col_idx
        part_key = part_rows.astype(np.int64) * self.n_block_cols + self.part_col_idx
        index = np.full(len(load_key), -1, np.int32)
        index[np.isin(load_key, part_key, assume_unique=True)] = np.arange(len(part_key))
        return index

    def head_map(self, batch: int, q_heads: int) -> np.ndarray:
        """int32 (batch, q_heads): `head_to_mask` with its 1s broadcast; MaskError where it does not broadcast."""
        try:
            return np.ascontiguousarray(np.broadcast_to(self.head_to_mask, (batch, q_heads)))
        except ValueError:
            raise MaskError(
                f"the mask has (batch, heads) = {self.head_to_mask.shape}, "
                f"which does not broadcast to ({batch}, {q_heads})"
            ) from None

    def to_dense(self) -> np.ndarray:
        """The boolean array this mask was made from, (1 or batch, 1 or q_heads, q_len, kv_len)."""
        block_rows = np.concatenate([self._block_row(r) for r in range(self.n_patterns * self.n_block_rows)])
        patterns = block_rows.reshape(self.n_patterns, -1, self.n_block_cols * self.block_n)
        row_at = positions(self.q_len, self.block_m, self.token_stride)
        column_at = positions(self.kv_len, self.block_n, self.token_stride)
        return patterns[:, row_at[:, None], column_at][self.head_to_mask]

    def _block_row(self, r: int) -> np.ndarray:
        blocks = np.zeros((self.n_block_cols, self.block_m, self.block_n), np.bool_)
        blocks[self.full_col_idx[self.full_row_ptr[r] : self.full_row_ptr[r + 1]]] = True
        part = slice(self.part_row_ptr[r], self.part_row_ptr[r + 1])
        blocks[self.part_col_idx[part]] = unpack_bitmap(self.bitmap[part], self.block_m, self.block_n)
        return blocks.swapaxes(0, 1).reshape(self.block_m, -1)

    def validate(self) -> "BlockSparseMask":
        """Check every rule of the format and return self; MaskError names array, index, value and rule."""
        mask_validation.validate(self)
        return self

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of lengths, block sizes and arrays: equal masks have equal digests."""
        sha = hashlib.sha256(repr((self.q_len, self.kv_len, self.block_m, self.block_n, self.token_stride)).encode())
        for name, array in self.arrays.items():
            array = np.ascontiguousarray(array)
            sha.update(f"{name}{array.shape}".encode())
            sha.update(array.data)
        return sha.hexdigest()

    def __eq__(self, other):
        return isinstance(other, BlockSparseMask) and self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)


def block_state(kept: np.ndarray, elements: int) -> np.ndarray:
    """EMPTY, PART or FULL as int8 for each block; `kept` (any shape) says how many of its `elements` a block keeps."""
    return (kept > 0).astype(np.int8) + (kept == elements)


def _row_ptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
