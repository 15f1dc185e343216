"""Mask operands of the CPU kernels: shapes, padding, and an order of work that balances threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tir_kernels.attention.cpu.operands import mask_operands, spread
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

TARGET = parse_target("llvm")
PROBLEM = AttentionProblem(2, 4, 2, 100, 70, 8, 8, "float32", 1.0)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(1, 8))
def test_spread_is_a_permutation_whose_contiguous_runs_share_the_cost(cost, threads):
    cost = np.array(cost)
    order = spread(cost)
    assert order.dtype == np.int32
    assert sorted(order) == list(range(len(cost)))
    runs = [cost[run] for run in np.array_split(order, threads)]
    # Each run differs from its share by a few of the largest units, however the costs are distributed.
    allowed = 2 * cost.max() * np.log2(2 * len(cost))
    assert all(abs(run.sum() - cost.sum() / threads) <= allowed for run in runs)


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_spread_parts_a_few_heavy_rows(threads):
    cost = np.full(1024, 8)
    cost[:8] = 64  # global tokens: the first block rows are full
    runs = np.split(cost[spread(cost)], threads)
    assert max(run.sum() for run in runs) <= 1.05 * cost.sum() / threads


def test_operands_of_an_empty_mask_are_not_zero_sized():
    mask = BlockSparseMask.from_dense(np.zeros((100, 70), bool), (64, 32))
    operands = mask_operands(mask, PROBLEM)
    assert [a.shape for a in operands] == [(16,), (2, 4), (3,), (1,), (3,), (1,), (1, 32)]
    assert [a.dtype for a in operands] == [np.int32] * 6 + [np.uint64]


@pytest.mark.parametrize("shape", [(100, 71), (99, 70), (3, 100, 70)])
def test_a_mask_of_other_lengths_or_heads_is_refused(shape):
    with pytest.raises(MaskError, match="100|broadcast"):
        mask_operands(BlockSparseMask.from_dense(np.ones(shape, bool), (64, 32)), PROBLEM)
