"""The plan of the warp-specialized kernel: block rows as items of work, and their blocks, partial ones first."""

import enum
from typing import Any, NamedTuple

import numpy as np

from tir_kernels.attention.block_wise.work import plan_shares
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask


class Item(enum.IntEnum):
    """The fields of an item, int32 each, in the order in which they lie in memory; four are loaded at once."""

    BEGIN = 0  # the listed blocks BEGIN … END - 1, at least one; those before FULL are partial, the others full ones
    FULL = 1
    END = 2
    HEAD = 3  # head `HEAD % q_heads` of batch entry `HEAD // q_heads`; -1: there is no more work
    FIRST_ROW = 4  # the first token of the block row
    SPLITS = 5  # how many items share the block row; 1 if it is not split
    SPLIT = 6  # which of them this is
    FIRST_SLOT = 7  # the first slot of the items that share the block row


class Listed(NamedTuple):
    """The blocks that the kernel walks: of each block row the partial blocks, then the full ones, each ascending.

    A row without blocks has one partial block, which keeps nothing: the kernel need not know rows without work.
    """

    row_ptr: np.ndarray  # int64 (block rows + 1,): where each row's blocks begin
    full_ptr: np.ndarray  # int64 (block rows,): where its full blocks begin
    column: np.ndarray  # int64 (blocks,)
    part: np.ndarray  # int32 (blocks,): row of the bitmap, -1 for full blocks, the number of its rows for added blocks


def listed_blocks(mask: BlockSparseMask) -> Listed:
    """The lists of a mask, and a block for each row that has none."""
    counts = np.diff(mask.load_row_ptr)
    (empty,) = np.nonzero(counts == 0)
    row = np.concatenate([np.repeat(np.arange(len(counts)), counts), empty])
    column = np.concatenate([mask.load_col_idx, np.zeros(len(empty), np.int32)])
    part = np.concatenate([mask.load_part_idx, np.full(len(empty), len(mask.bitmap), np.int32)])
    order = np.lexsort((column, part < 0, row))
    row_ptr = np.concatenate([[0], np.cumsum(np.maximum(counts, 1))])
    full_ptr = row_ptr[:-1] + np.maximum(np.diff(mask.part_row_ptr), counts == 0)
    return Listed(row_ptr, full_ptr, column[order].astype(np.int64), part[order])


def plan_items(
    mask: BlockSparseMask, listed: Listed, problem: AttentionProblem, gpu: GPU, ctas: int
) -> tuple[np.ndarray, int]:
    """(items, number of slots): int32 (items, fields of Item), in the order in which `ctas` CTAs take them."""
    shares = plan_shares(mask, problem, gpu, ctas, listed.row_ptr)
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
