"""The mask as the kernels read it: block-CSR over blocks, one uint64 bitmap for every 8×8 tile of a part block."""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from tir_kernels.errors import MaskError

TILE = 8  # a uint64 holds 8×8 elements


@dataclass(frozen=True, eq=False)
class BlockSparseMask:
    """Two-level storage of one or several (q_len, kv_len) boolean patterns (paper, section on mask storage).

    The level above: each pattern is cut into blocks of block_m × block_n.  A block is *empty* (keeps nothing, is in
    no list), *full* (keeps everything, needs no masking) or *part*.  Full, part and load (= full ∪ part) blocks are
    three block-CSR lists with ascending columns.  Row `p * n_block_rows + r` is block row r of pattern p.

    The level below: a part block's bitmap has one uint64 for each 8×8 tile, tiles in column-major order; bit
    `8 * (row % 8) + col % 8`, least significant first, is 1 where (row, col) is kept.  Elements past q_len or
    kv_len are 0, so a ragged edge makes its blocks part blocks.

    Attributes
    ----------
    q_len, kv_len, block_m, block_n : int
        Lengths of the pattern, and block height and width (multiples of 8).
    full_row_ptr, part_row_ptr, load_row_ptr : int32 (n_patterns * n_block_rows + 1,)
        Prefix sums of the number of blocks in each block row.
    full_col_idx, part_col_idx, load_col_idx : int32 (number of blocks,)
        Block columns, ascending in each block row.
    bitmap : uint64 (number of part blocks, tiles_m * tiles_n)
        Tile (tr, tc) of a part block is entry `tc * tiles_m + tr`, with tiles_m = block_m / 8.
    head_to_mask : int32 (1 or batch, 1 or q_heads)
        The pattern of each batch entry and head; a 1 stands for all of them.
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

    # -- construction -------------------------------------------------------------------------------------------

    @staticmethod
    def from_dense(keep: np.ndarray, block: tuple[int, int] = (64, 64)) -> "BlockSparseMask":
        """Compress a boolean array of shape (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len).

        Equal patterns are stored once.  Raises MaskError for another rank or dtype, or a block size that is not a
        positive multiple of 8.
        """
        keep = np.asarray(keep)
        if keep.dtype != np.bool_:
            raise MaskError(f"a dense mask must be boolean, got {keep.dtype}")
        if keep.ndim not in (2, 3, 4):
            raise MaskError(f"a dense mask has 2 to 4 dimensions, got shape {keep.shape}")
        grid = keep.reshape((1,) * (4 - keep.ndim) + keep.shape)
        patterns, ids = [], {}
        head_to_mask = np.zeros(grid.shape[:2], np.int32)
        for b, h in np.ndindex(*grid.shape[:2]):
            key = hashlib.sha256(np.packbits(grid[b, h])).digest()
            if key not in ids:
                ids[key] = len(patterns)
                patterns.append(grid[b, h])
            head_to_mask[b, h] = ids[key]
        block_m, block_n = check_block(block)
        q_len, kv_len = grid.shape[2:]
        rows, cols = -(-q_len // block_m), -(-kv_len // block_n)
        states, bitmaps = [], []
        for pattern in patterns:
            padded = np.zeros((rows * block_m, cols * block_n), np.bool_)
            padded[:q_len, :kv_len] = pattern
            blocks = padded.reshape(rows, block_m, cols, block_n).swapaxes(1, 2)
            count = blocks.sum(axis=(2, 3), dtype=np.int64)
            state = np.where(count == block_m * block_n, FULL, np.where(count > 0, PART, EMPTY)).astype(np.int8)
            states.append(state)
            bitmaps.append(pack_bitmap(blocks[state == PART]))
        return BlockSparseMask.from_states(q_len, kv_len, (block_m, block_n), states, bitmaps, head_to_mask)

    @staticmethod
    def from_states(q_len, kv_len, block, states, bitmaps, head_to_mask) -> "BlockSparseMask":
        """Assemble from each pattern's block states, int8 (n_block_rows, n_block_cols), and part-block bitmaps.

        `bitmaps[p]` is uint64 (number of part blocks, tiles), blocks in row-major order of `states[p]`.
        """
        arrays = {}
        for name, wanted in (("full", (FULL,)), ("part", (PART,)), ("load", (FULL, PART))):
            counts, columns = [], []
            for state in states:
                listed = np.isin(state, wanted)
                counts.append(listed.sum(axis=1))
                columns.append(np.nonzero(listed)[1])
            arrays[f"{name}_row_ptr"] = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int32)
            arrays[f"{name}_col_idx"] = np.concatenate(columns).astype(np.int32)
        return BlockSparseMask(
            q_len, kv_len, *block, **arrays, bitmap=np.concatenate(bitmaps), head_to_mask=np.asarray(head_to_mask, np.int32)
        )

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def n_block_rows(self) -> int:
        return -(-self.q_len // self.block_m)

    @property
    def n_block_cols(self) -> int:
        return -(-self.kv_len // self.block_n)

    @property
    def n_patterns(self) -> int:
        return (len(self.load_row_ptr) - 1) // self.n_block_rows

    @property
    def block_density(self) -> float:
        """Listed blocks over all blocks, averaged over patterns."""
        return len(self.load_col_idx) / (self.n_patterns * self.n_block_rows * self.n_block_cols)

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
                f"the mask has (batch, heads) = {self.head_to_mask.shape}, which does not broadcast to ({batch}, {q_heads})"
            ) from None

    def to_dense(self) -> np.ndarray:
        """The boolean array this mask was made from, (1 or batch, 1 or q_heads, q_len, kv_len)."""
        block_rows = np.concatenate([self._block_row(r) for r in range(self.n_patterns * self.n_block_rows)])
        patterns = block_rows.reshape(self.n_patterns, -1, self.n_block_cols * self.block_n)
        return patterns[:, : self.q_len, : self.kv_len][self.head_to_mask]

    def _block_row(self, r: int) -> np.ndarray:
        blocks = np.zeros((self.n_block_cols, self.block_m, self.block_n), np.bool_)
        blocks[self.full_col_idx[self.full_row_ptr[r] : self.full_row_ptr[r + 1]]] = True
        part = slice(self.part_row_ptr[r], self.part_row_ptr[r + 1])
        blocks[self.part_col_idx[part]] = unpack_bitmap(self.bitmap[part], self.block_m, self.block_n)
        return blocks.swapaxes(0, 1).reshape(self.block_m, -1)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of lengths, block sizes and arrays: equal masks have equal digests."""
        sha = hashlib.sha256(repr((self.q_len, self.kv_len, self.block_m, self.block_n)).encode())
        for field in fields(self)[4:]:
            array = np.ascontiguousarray(getattr(self, field.name))
            sha.update(f"{field.name}{array.shape}".encode() + array.tobytes())
        return sha.hexdigest()

    def __eq__(self, other):
        return isinstance(other, BlockSparseMask) and self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)


EMPTY, PART, FULL = np.int8(0), np.int8(1), np.int8(2)


def check_block(block) -> tuple[int, int]:
    """The block as two ints; MaskError unless both are positive multiples of 8."""
    try:
        block_m, block_n = (int(n) for n in block)
    except (TypeError, ValueError):
        raise MaskError(f"block={block!r} must be a pair (height, width)") from None
    for name, n in (("height", block_m), ("width", block_n)):
        if n < TILE or n % TILE:
            raise MaskError(f"block {name} {n} must be a positive multiple of {TILE}")
    return block_m, block_n


def pack_bitmap(blocks: np.ndarray) -> np.ndarray:
    """Boolean (n, block_m, block_n) → uint64 (n, tiles), tiles column-major, bit 8*row+col of a tile."""
    n, block_m, block_n = blocks.shape
    tiles = blocks.reshape(n, block_m // TILE, TILE, block_n // TILE, TILE).transpose(0, 3, 1, 2, 4)
    octets = np.packbits(np.ascontiguousarray(tiles), axis=-1, bitorder="little")
    return octets.reshape(n, -1, TILE).view("<u8").reshape(n, (block_m // TILE) * (block_n // TILE)).astype(np.uint64)


def unpack_bitmap(bitmap: np.ndarray, block_m: int, block_n: int) -> np.ndarray:
    """The inverse of `pack_bitmap`: uint64 (n, tiles) → boolean (n, block_m, block_n)."""
    n = len(bitmap)
    octets = np.ascontiguousarray(bitmap.astype("<u8")).view(np.uint8)
    tiles = np.unpackbits(octets, bitorder="little").reshape(n, block_n // TILE, block_m // TILE, TILE, TILE)
    return tiles.transpose(0, 2, 3, 1, 4).reshape(n, block_m, block_n).astype(np.bool_)
