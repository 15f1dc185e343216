"""The plan of the warp-specialized kernel: block rows as items of work, tiles of their blocks, partial ones first."""

import enum
from typing import Any, NamedTuple

import numpy as np

from tir_kernels.attention.block_wise.work import plan_shares
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask


class Item(enum.IntEnum):
    """The fields of an item, int32 each, in the order in which they lie in memory; four are loaded at once."""

    BEGIN = 0  # the listed tiles BEGIN … END - 1, at least one; those before FULL have partial blocks, others full ones
    FULL = 1
    END = 2
    HEAD = 3  # head `HEAD % q_heads` of batch entry `HEAD // q_heads`; -1: there is no more work
    FIRST_ROW = 4  # the first token of the block row; negative where its first rows are no tokens
    SPLITS = 5  # how many items share the block row; 1 if it is not split
    SPLIT = 6  # which of them this is
    FIRST_SLOT = 7  # the first slot of the items that share the block row


class Listed(NamedTuple):
    """The tiles that the kernel walks, of `together` blocks each: of each block row the blocks that were added, then
    its partial blocks, then the full ones, each ascending.

    Blocks that keep nothing are added where a row's do not fill its tiles, and to a row that has none: the kernel need
    not know rows without work.
    """

    row_ptr: np.ndarray  # int64 (block rows + 1,): where each row's tiles begin
    full_ptr: np.ndarray  # int64 (block rows,): where its tiles of full blocks begin
    column: np.ndarray  # int64 (tiles * together,): of added blocks behind all keys, where zeros are copied from
    part: np.ndarray  # int32 (tiles * together,): see `NOTHING` and `EVERYTHING`; -1 in tiles of full blocks


NOTHING, EVERYTHING = 0, 1  # rows of keep bits behind a mask's: of blocks that were added, of full ones beside partial


def listed_blocks(mask: BlockSparseMask, together: int = 1) -> Listed:
    """The lists of a mask, with the blocks that are added; a lone one that is added lies at the first keys."""
    counts, rows = np.diff(mask.load_row_ptr).astype(np.int64), len(mask.bitmap)
    tiles = np.maximum(-(-counts // together), 1)
    added = tiles * together - counts
    row = np.concatenate([np.repeat(np.arange(len(counts)), n) for n in (counts, added)])
    column = np.concatenate([mask.load_col_idx, np.full(added.sum(), 0 if together == 1 else mask.n_block_cols)])
    part = np.concatenate([mask.load_part_idx, np.full(added.sum(), rows + NOTHING, np.int32)])
    order = np.lexsort((column, part < 0, part != rows + NOTHING, row))
    row_ptr = np.concatenate([[0], np.cumsum(tiles)])
    full_ptr = row_ptr[:-1] + -(-(added + np.diff(mask.part_row_ptr)) // together)
    column, part, row = column[order].astype(np.int64), part[order].astype(np.int32), row[order]
    beside = (part < 0) & (np.arange(len(part)) < full_ptr[row] * together)
    return Listed(row_ptr, full_ptr, column, np.where(beside, rows + EVERYTHING, part).astype(np.int32))


def plan_items(
    mask: BlockSparseMask,
    listed: Listed,
    problem: AttentionProblem,
    gpu: GPU,
    ctas: int,
    tile_n: int,
    leading_rows: int = 0,
) -> tuple[np.ndarray, int]:
    """(items, number of slots): int32 (items, fields of Item), in the order in which `ctas` CTAs take them.

    So many of the mask's rows come before the first token's.
    """
    shares = plan_shares(mask, problem, gpu, ctas, listed.row_ptr, tile_n)
    shares = shares._replace(first_row=shares.first_row - leading_rows)
    full = np.clip(listed.full_ptr[shares.row], shares.begin, shares.end)
    fields = fields_of(shares, full)
    return np.stack([fields[field] for field in Item], axis=1).astype(np.int32), shares.slots


def fields_of(shares, full) -> dict[int, Any]:
    """The fields of items by their numbers; `full` says where their full blocks begin."""
    return {
        Item.BEGIN: shares.begin,
        Item.FULL: full,
        Item.END: shares.end,
        Item.HEAD: shares.head,
        Item.FIRST_ROW: shares.first_row,
        Item.SPLITS: shares.splits,
        Item.SPLIT: shares.split,
        Item.FIRST_SLOT: shares.first_slot,
    }
