"""The arrays that the CUDA row-wise kernel reads: lists of kept tokens, and the plan that splits them among CTAs."""

from typing import NamedTuple

import numpy as np

from tir_kernels.attention.block_wise.operands import lane_keep_bits
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise.geometry import TOKENS, record_shape, row_tiles_of_kv_head, rows_of_kv_head
from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.shared_tiles import MMA_ROWS, element_bytes
from tir_kernels.masks.bitmap import pack_bitmap, unpack_bitmap
from tir_kernels.masks.block_sparse import BlockSparseMask

CTAS = 2  # for each multiprocessor: all of them run at once
# One multiprocessor reads about 100 GB/s, and merging splits costs about 2 µs, in which it would read 200 KB.
LARGEST_UNSPLIT_BYTES = 192 << 10
SMALLEST_SPLIT_BYTES = 64 << 10


class TokenList(NamedTuple):
    """The tokens that at least one row of a row tile keeps: first those that all rows keep, then the others.

    columns : int32 (tiles, 16)
        Token positions; the last tile is filled up with a position that exists.
    first_part : int
        The first tile with an element that is not kept; it and all later ones are masked.
    keep_bits : uint32 (tiles - first_part, 1, 32 lanes, 1)
        The keep bits of the masked tiles, in the order of mma accumulators.
    """

    columns: np.ndarray
    first_part: int
    keep_bits: np.ndarray


def row_wise_operands(mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU) -> list[np.ndarray]:
    """[work, columns, keep_bits, partials, arrivals], in argument order; never empty.

    work : int32 (number of CTAs, 8)
        What each CTA does: (unit, begin, end, first_part, keep_offset, first_slot, splits, slot).  It computes tiles
        begin … end - 1 of `columns` for row tile `unit % n_row_tiles` of key/value head `unit // n_row_tiles`.  Tiles
        from `first_part` on are masked, tile p by row p + keep_offset of `keep_bits`.  If its unit has several splits,
        the CTA writes row `slot` of `partials`; rows first_slot … first_slot + splits - 1 are merged.
    columns : int32 (number of tiles, 16)
        The `TokenList`s of all distinct row tiles; equal ones are stored once.
    keep_bits : uint32 (number of masked tiles, 1, 32, 1)
    partials : float32 (number of slots, rows, v_head_dim + 8), arrivals : uint32 (units,)
        Workspace, zero at first.  The kernel leaves `arrivals` zero again, so it can be launched any number of times
        one after the other, but two launches that share these arrays must not run at the same time.
    """
    unit_rows = rows_of_units(mask, problem)
    distinct, list_of_unit = np.unique(unit_rows, axis=0, return_inverse=True)
    list_of_unit = list_of_unit.reshape(-1)
    lists = [token_list(_keep(mask, rows)) for rows in distinct]
    first_tile = np.cumsum([0] + [len(x.columns) for x in lists])
    first_keep = np.cumsum([0] + [len(x.keep_bits) for x in lists])
    first_part = first_tile[:-1] + [x.first_part for x in lists]

    splits = split_counts(np.diff(first_tile)[list_of_unit], problem, gpu)
    unit = np.repeat(np.arange(len(splits)), splits)
    slots = np.where(splits > 1, splits, 0)
    first_slot = np.cumsum(slots) - slots
    split = np.arange(len(unit)) - np.repeat(np.cumsum(splits) - splits, splits)
    source, of = list_of_unit[unit], splits[unit]
    tiles = np.diff(first_tile)[source]
    work = [
        unit,
        first_tile[source] + tiles * split // of,
        first_tile[source] + tiles * (split + 1) // of,
        first_part[source],
        (first_keep[:-1] - first_part)[source],
        first_slot[unit],
        of,
        first_slot[unit] + split,
    ]
    return [
        np.stack(work, axis=1).astype(np.int32),
        _concatenate([x.columns for x in lists]),
        _concatenate([x.keep_bits for x in lists]),
        np.zeros((max(1, slots.sum()), *record_shape(problem)), np.float32),
        np.zeros(len(splits), np.uint32),
    ]


def split_counts(tiles: np.ndarray, problem: AttentionProblem, gpu: GPU) -> np.ndarray:
    """How many CTAs share each unit: one for a short unit; for long ones, as many as fill `gpu`.

    `tiles`, the number of tiles of each unit, and the result are int64 (units,).  A CTA's share of tiles is as small as
    it can be if all CTAs are to run at once.  If there are more units than CTAs that run at once, only units of more
    than an even share are split.
    """
    tile_bytes = TOKENS * element_bytes(problem.dtype) * (problem.head_dim + problem.v_head_dim)

    def counts(share):
        return np.where(tiles * tile_bytes <= LARGEST_UNSPLIT_BYTES, 1, -(-tiles // share))

    ctas = CTAS * gpu.multiprocessors
    share = max(-(-tiles.sum() // ctas), -(-SMALLEST_SPLIT_BYTES // tile_bytes))
    while len(tiles) <= ctas < counts(share).sum():
        share += 1
    return counts(share)


def token_list(keep: np.ndarray) -> TokenList:
    """The token list of a boolean array (rows, kv_len) of at most 16 rows."""
    full, some = keep.all(axis=0), keep.any(axis=0)
    columns = np.concatenate([np.nonzero(full)[0], np.nonzero(some & ~full)[0]])
    n_tiles = -(-len(columns) // TOKENS)
    first_part = min(int(full.sum()) // TOKENS, n_tiles)
    masked = columns[first_part * TOKENS :]
    kept = np.zeros((MMA_ROWS, (n_tiles - first_part) * TOKENS), np.bool_)
    kept[: len(keep), : len(masked)] = keep[:, masked]
    blocks = kept.reshape(MMA_ROWS, n_tiles - first_part, TOKENS).swapaxes(0, 1)
    padded = np.pad(columns, (0, n_tiles * TOKENS - len(columns)), mode="edge") if n_tiles else columns
    return TokenList(
        padded.astype(np.int32).reshape(n_tiles, TOKENS),
        first_part,
        lane_keep_bits(pack_bitmap(blocks), MMA_ROWS, TOKENS),
    )


def rows_of_units(mask: BlockSparseMask, problem: AttentionProblem) -> np.ndarray:
    """int64 (units, 16): pattern * q_len + query of each row, -1 for rows past the last of a key/value head."""
    patterns = mask.head_map(problem.batch, problem.q_heads).reshape(-1, problem.group, 1)
    rows = (patterns * problem.q_len + np.arange(problem.q_len)).reshape(-1, rows_of_kv_head(problem))
    unused = row_tiles_of_kv_head(problem) * MMA_ROWS - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, unused)), constant_values=-1).reshape(-1, MMA_ROWS)


def _keep(mask, rows) -> np.ndarray:
    """Boolean (rows that exist, kv_len) of one unit."""
    pattern, query = np.divmod(rows[rows >= 0], mask.q_len)
    dense = {p: _block_row(mask, p) for p in np.unique(pattern)}
    return np.stack([dense[p][i] for p, i in zip(pattern, query)])


def _block_row(mask, row) -> np.ndarray:
    """Boolean (block_m, kv_len) of a block row, which is a whole pattern because block_m is at least q_len."""
    blocks = np.zeros((mask.n_block_cols, mask.block_m, mask.block_n), np.bool_)
    blocks[mask.full_col_idx[mask.full_row_ptr[row] : mask.full_row_ptr[row + 1]]] = True
    part = slice(mask.part_row_ptr[row], mask.part_row_ptr[row + 1])
    blocks[mask.part_col_idx[part]] = unpack_bitmap(mask.bitmap[part], mask.block_m, mask.block_n)
    return blocks.swapaxes(0, 1).reshape(mask.block_m, -1)[:, : mask.kv_len]


def _concatenate(arrays) -> np.ndarray:
    """The arrays stacked along their rows; one row of zeros if there is none."""
    joined = np.concatenate(arrays)
    return joined if len(joined) else np.zeros((1, *joined.shape[1:]), joined.dtype)
