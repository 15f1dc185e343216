"""The plan of the CUDA block-wise kernel: what each CTA does, and which block rows are split among CTAs."""

import enum
from typing import Any, NamedTuple

import numpy as np

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.shared_tiles import element_bytes
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.token_blocks import first_tokens

CTAS = 3  # CTAs that run at once on a multiprocessor
L2_PARTS = 3  # the keys and values of a group of heads fill one of 3 parts of the L2 cache: 20 MB on an H200
SMALLEST_SPLIT_KEYS = 128  # fewer keys are not worth a CTA
MERGE_KEYS = 256  # merging the splits of a row takes as long as attending to this many keys
MOST_SPLITS = 16


class Item(enum.IntEnum):
    """The fields of a CTA's work, int32 each, in the order in which they lie in memory."""

    BEGIN = 0  # the listed blocks BEGIN … END - 1 of the mask
    END = 1
    FIRST_KEY = 2  # the first token of block BEGIN
    SLOT = 3  # where this CTA leaves its partial result, if its block row is split
    HEAD = 4  # head `HEAD % q_heads` of batch entry `HEAD // q_heads`
    FIRST_ROW = 5  # the first token of the block row
    SPLITS = 6  # how many CTAs share the block row; 1 if it is not split
    FIRST_SLOT = 7  # the first slot of the CTAs that share the block row


class Shares(NamedTuple):
    """Block rows, or parts of rows that are split: int64 arrays of equal length, in the order in which they start.

    The parts of a split row leave results in slots first_slot … first_slot + splits - 1 of `slots` in all.
    """

    head: np.ndarray  # head `head % q_heads` of batch entry `head // q_heads`
    row: np.ndarray  # the block row's index in the mask's lists
    first_row: np.ndarray  # the first token of the block row
    begin: np.ndarray  # the listed blocks begin … end - 1 of the mask
    end: np.ndarray
    splits: np.ndarray  # how many parts the block row has; 1 if it is not split
    split: np.ndarray  # which of them this is
    first_slot: np.ndarray
    slots: int


def plan_work(mask: BlockSparseMask, problem: AttentionProblem, gpu: GPU) -> tuple[np.ndarray, int]:
    """(work, number of slots): int32 (CTAs, fields of Item), in the order in which the CTAs start on `gpu`.

    The CTAs of a block row that is split leave partial results in slots FIRST_SLOT … FIRST_SLOT + SPLITS - 1; a row
    that is not split has no slots.
    """
    shares = plan_shares(mask, problem, gpu, ctas_at_once(mask.block_m, gpu), mask.load_row_ptr)
    fields = fields_of(shares, np.append(first_keys(mask), 0)[shares.begin])
    return np.stack([fields[field] for field in Item], axis=1).astype(np.int32), shares.slots


def fields_of(shares, first_key) -> dict[int, Any]:
    """The fields of the CTAs' work by their numbers; `first_key` is the first token of each share's first block."""
    return {
        Item.BEGIN: shares.begin,
        Item.END: shares.end,
        Item.FIRST_KEY: first_key,
        Item.SLOT: shares.first_slot + shares.split,
        Item.HEAD: shares.head,
        Item.FIRST_ROW: shares.first_row,
        Item.SPLITS: shares.splits,
        Item.FIRST_SLOT: shares.first_slot,
    }


def plan_shares(
    mask: BlockSparseMask,
    problem: AttentionProblem,
    gpu: GPU,
    ctas: int,
    row_ptr: np.ndarray,
    block_n: int | None = None,
) -> Shares:
    """The block rows of all heads in the order of `start_order`, long ones split among `ctas` CTAs.

    `row_ptr`, int32 or int64 (block rows + 1,), says where each row's blocks begin in the lists that the kernel reads,
    as `mask.load_row_ptr` does.  What is listed has `block_n` keys, by default those of the mask's blocks.
    """
    patterns = mask.head_map(problem.batch, problem.q_heads).reshape(-1, 1)
    block_row = mask.row_order.reshape(mask.n_patterns, -1)[patterns[:, 0]]  # (head, rank)
    row = patterns * mask.n_block_rows + block_row
    begin = row_ptr[row]
    length = row_ptr[row + 1] - begin
    splits = split_counts(length, block_n or mask.block_n, ctas)
    head, rank = (x[start_order(problem, length.shape[1], gpu)] for x in np.divmod(np.arange(row.size), row.shape[1]))

    of = splits[head, rank]
    slots = np.where(of > 1, of, 0)
    first_slot = np.cumsum(slots) - slots
    item = np.repeat(np.arange(len(of)), of)  # each share's index into head, rank, of and first_slot
    split = np.arange(len(item)) - np.repeat(np.cumsum(of) - of, of)
    head, rank, of, first_slot = head[item], rank[item], of[item], first_slot[item]
    start, length = begin[head, rank], length[head, rank].astype(np.int64)
    begin, end = start + length * split // of, start + length * (split + 1) // of
    first_row = first_tokens(mask.q_len, mask.block_m, mask.token_stride)[block_row[head, rank]]
    return Shares(head, row[head, rank], first_row, begin, end, of, split, first_slot, int(slots.sum()))


def first_keys(mask: BlockSparseMask) -> np.ndarray:
    """int64 (listed blocks,), parallel to load_col_idx: the first token of each."""
    return first_tokens(mask.kv_len, mask.block_n, mask.token_stride)[mask.load_col_idx]


def ctas_at_once(block_m: int, gpu: GPU) -> int:
    """How many CTAs of this kernel run at once, about: CTAs of few rows have few warps, so more of them run."""
    return CTAS * gpu.multiprocessors * max(1, 64 // block_m)


def split_counts(length: np.ndarray, block_n: int, ctas: int, heads=1) -> np.ndarray:
    """How many CTAs share each block row, given its listed blocks: rows far above a CTA's fair share are split.

    `length`, and the result, are int32 or int64 of shape (rows,) or (patterns, rows).  `heads` says how many heads have
    each pattern: int of shape (patterns,), or one number for all.  A fair share is all blocks over `ctas` CTAs.
    """
    total = int(np.sum(length.sum(axis=-1, dtype=np.int64) * heads))
    share = max(-(-total // ctas), -(-SMALLEST_SPLIT_KEYS // block_n))
    splits = np.where(length > share + MERGE_KEYS // block_n, -(-length // share), 1)
    return np.minimum(splits, MOST_SPLITS)


def start_order(problem: AttentionProblem, n_block_rows: int, gpu: GPU) -> np.ndarray:
    """int64 (heads * n_block_rows,): permutation of head * n_block_rows + rank; rank 0 is a head's heaviest block row.

    The heaviest 1/64 of every head's rows start first, because a long row that starts last delays the kernel.  The
    others follow one group of heads at a time, heavy rows first.  What continues an earlier part begins with the heads
    that this part ended with, whose tensors the L2 cache still has.
    """
    n_heads = problem.batch * problem.q_heads
    head, rank = np.divmod(np.arange(n_heads * n_block_rows), n_block_rows)
    later = rank >= -(-n_block_rows // 64)
    group = np.where(later, head // heads_per_group(problem, gpu), 0) * (-1 if problem.continues else 1)
    return np.lexsort((head, rank, group, later))


def heads_per_group(problem: AttentionProblem, gpu: GPU) -> int:
    """Number of (batch, head) pairs whose block rows are interleaved.

    It is the largest with which their keys and values fit a third of the L2 cache, so that rows find them there.
    """
    n_heads = problem.batch * problem.q_heads
    head_bytes = problem.kv_len * (problem.head_dim + problem.v_head_dim) * element_bytes(problem.dtype) / problem.group
    limit = max(problem.group, int(gpu.l2_bytes // L2_PARTS / head_bytes))
    return max(n for n in range(1, min(limit, n_heads) + 1) if n_heads % n == 0)
