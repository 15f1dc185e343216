"""The plan of the CUDA block-wise kernel: what each CTA does, and which block rows are split among CTAs."""

import numpy as np

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.token_blocks import first_tokens

CTAS = 396  # that run at once: three on each of an H200's 132 multiprocessors
SMALLEST_SPLIT_KEYS = 128  # a CTA is not started for fewer
MERGE_KEYS = 256  # whose computation takes as long as merging the splits of a row
MOST_SPLITS = 16


def plan_work(mask: BlockSparseMask, problem: AttentionProblem) -> tuple[np.ndarray, int]:
    """(work, number of slots): `work` is int32 (CTAs, 8), in the order in which the CTAs start.

    Each row is (begin, end, first key, slot, head, first row, splits, first slot).  The CTA computes blocks begin … end
    of the mask's lists; the first of them starts at token `first key`.  Its block row starts at token `first row` and
    belongs to head `head % q_heads` of batch entry `head // q_heads`.  The CTAs of a block row that is split leave
    partial results in slots first_slot … first_slot + splits, this one in `slot`; a row that is not split has splits =
    1 and no slots.
    """
    patterns = mask.head_map(problem.batch, problem.q_heads).reshape(-1, 1)
    block_row = mask.row_order.reshape(mask.n_patterns, -1)[patterns[:, 0]]  # (head, rank)
    row = patterns * mask.n_block_rows + block_row
    begin = mask.load_row_ptr[row]
    length = mask.load_row_ptr[row + 1] - begin
    splits = split_counts(length, mask.block_m, mask.block_n)
    head, rank = (x[start_order(problem, length.shape[1])] for x in np.divmod(np.arange(row.size), row.shape[1]))

    of = splits[head, rank]
    slots = np.where(of > 1, of, 0)
    first_slot = np.cumsum(slots) - slots
    item = np.repeat(np.arange(len(of)), of)  # of each CTA
    split = np.arange(len(item)) - np.repeat(np.cumsum(of) - of, of)
    head, rank, of, first_slot = head[item], rank[item], of[item], first_slot[item]
    start, length = begin[head, rank], length[head, rank].astype(np.int64)
    begin, end = start + length * split // of, start + length * (split + 1) // of
    first_key = np.append(first_keys(mask), 0)[begin]
    first_row = first_tokens(mask.q_len, mask.block_m, mask.token_stride)[block_row[head, rank]]
    work = [begin, end, first_key, first_slot + split, head, first_row, of, first_slot]
    return np.stack(work, axis=1).astype(np.int32), int(slots.sum())


def first_keys(mask: BlockSparseMask) -> np.ndarray:
    """int64 (listed blocks,), parallel to load_col_idx: the first token of each."""
    return first_tokens(mask.kv_len, mask.block_n, mask.token_stride)[mask.load_col_idx]


def split_counts(length: np.ndarray, block_m: int, block_n: int, heads=1) -> np.ndarray:
    """Number of CTAs that share each block row, from its listed blocks; rows far above a CTA's fair share are split.

    `length` is int32 or int64 (rows,) or (patterns, rows), and the result has the same shape and dtype.  `heads` is the
    number of heads that share each pattern: int (patterns,), or one number for all.
    """
    ctas = CTAS * max(1, 64 // block_m)  # CTAs of few rows have few warps, so more of them run at once
    total = int(np.sum(length.sum(axis=-1, dtype=np.int64) * heads))
    share = max(-(-total // ctas), -(-SMALLEST_SPLIT_KEYS // block_n))
    splits = np.where(length > share + MERGE_KEYS // block_n, -(-length // share), 1)
    return np.minimum(splits, MOST_SPLITS)


def start_order(problem: AttentionProblem, n_block_rows: int) -> np.ndarray:
    """int64 (heads * n_block_rows,): permutation of head * n_block_rows + rank; rank 0 is a head's heaviest block row.

    The heaviest 64th of every head's rows starts first, because long rows must not be last.  The others follow one
    group of heads at a time, heavy rows first within a group.
    """
    n_heads = problem.batch * problem.q_heads
    head, rank = np.divmod(np.arange(n_heads * n_block_rows), n_block_rows)
    later = rank >= -(-n_block_rows // 64)
    group = np.where(later, head // heads_per_group(problem), 0)
    return np.lexsort((head, rank, group, later))


def heads_per_group(problem: AttentionProblem) -> int:
    """Number of (batch, head) pairs whose block rows are interleaved.

    Their keys and values fill at most half of an A100's L2 cache (40 MB), so that rows that share them find them there.
    """
    n_heads = problem.batch * problem.q_heads
    head_bytes = problem.kv_len * (problem.head_dim + problem.v_head_dim) * ELEMENT_BYTES / problem.group
    limit = max(problem.group, int((20 << 20) / head_bytes))
    return max(n for n in range(1, min(limit, n_heads) + 1) if n_heads % n == 0)
