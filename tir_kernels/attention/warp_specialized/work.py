"""The plan of the warp-specialized kernel: block rows as items of work, and their blocks, partial ones first."""

import enum

import numpy as np

from tir_kernels.attention.block_wise.work import plan_shares
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_sparse import BlockSparseMask


class Item(enum.IntEnum):
    """The fields of an item, int32 each, in the order in which they lie in memory."""

    BEGIN = 0  # the listed blocks BEGIN … END - 1; those before FULL are partial blocks, the others full ones
    FULL = 1
    END = 2
    HEAD = 3  # head `HEAD % q_heads` of batch entry `HEAD // q_heads`; -1: there is no more work
    FIRST_ROW = 4  # the first token of the block row
    SPLITS = 5  # how many items share the block row; 1 if it is not split
    SPLIT = 6  # which of them this is
    FIRST_SLOT = 7  # the first slot of the items that share the block row


def plan_items(mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU, ctas: int) -> tuple[np.ndarray, int]:
    """(items, number of slots): int32 (items, fields of Item), in the order in which `ctas` CTAs take them."""
    shares = plan_shares(mask, problem, gpu, ctas)
    first_full = mask.load_row_ptr[:-1] + np.diff(mask.part_row_ptr)
    fields = {
        Item.BEGIN: shares.begin,
        Item.FULL: np.clip(first_full[shares.row], shares.begin, shares.end),
        Item.END: shares.end,
        Item.HEAD: shares.head,
        Item.FIRST_ROW: shares.first_row,
        Item.SPLITS: shares.splits,
        Item.SPLIT: shares.split,
        Item.FIRST_SLOT: shares.first_slot,
    }
    return np.stack([fields[field] for field in Item], axis=1).astype(np.int32), shares.slots


def parts_first(mask: BlockSparseMask) -> tuple[np.ndarray, np.ndarray]:
    """(columns, parts) of the listed blocks: of each block row the partial blocks, then the full ones, each ascending.

    Block columns int64, and int32 numbers among the partial blocks, -1 for full blocks; both (listed blocks,).
    """
    row = np.repeat(np.arange(len(mask.load_row_ptr) - 1), np.diff(mask.load_row_ptr))
    part = mask.load_part_idx
    order = np.lexsort((np.arange(len(part)), part < 0, row))
    return mask.load_col_idx[order].astype(np.int64), part[order]
