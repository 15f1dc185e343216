"""Predicted time of the CPU kernels on one processor: the model counts arithmetic, and serves to rank kernels.

A block-wise kernel computes every element of every listed block, at the rate of register-tiled products; a row-wise
kernel computes only kept elements, at the rate of dot products.  Both also take a fixed time for each block and row.
"""

from dataclasses import dataclass

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.masks.block_sparse import BlockSparseMask


@dataclass(frozen=True)
class Cost:
    """Nanoseconds for one multiply-add of a score or output element, one listed block, and one query row."""

    element: float
    block: float
    row: float


# Fitted on AMD Zen 5 (AVX-512).
BLOCK_WISE = Cost(element=0.009, block=300.0, row=20.0)
ROW_WISE = Cost(element=0.08, block=20.0, row=100.0)


def block_wise_us(problem: AttentionProblem, mask: BlockSparseMask) -> float:
    """Predicted microseconds of the block-wise kernel for a mask in blocks of its configuration."""
    blocks = _blocks(mask)
    return _us(problem, BLOCK_WISE, blocks * mask.block_m * mask.block_n, blocks)


def row_wise_us(problem: AttentionProblem, mask: BlockSparseMask) -> float:
    """Predicted microseconds of the row-wise kernel, in which each row walks the list of its block row."""
    elements = mask.density * problem.q_len * problem.kv_len
    if problem.has_positions:  # as many blocks for each row as a block row has on average
        return _us(problem, ROW_WISE, elements, _blocks(mask) * problem.q_len / mask.n_block_rows)
    return _us(problem, ROW_WISE, elements, _blocks(mask) * min(mask.block_m, problem.q_len))


def _blocks(mask: BlockSparseMask) -> float:
    """Listed blocks of a pattern, on average."""
    return len(mask.load_col_idx) / mask.n_patterns


def _us(problem: AttentionProblem, cost: Cost, elements: float, blocks: float) -> float:
    heads, dims = problem.batch * problem.q_heads, problem.head_dim + problem.v_head_dim
    return heads * (elements * dims * cost.element + blocks * cost.block + problem.q_len * cost.row) / 1000
