"""Masks with rows before their first, against the dense mask."""

import numpy as np
import pytest

from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.leading_rows import with_leading_rows


def patterns(q_len, kv_len) -> np.ndarray:
    """Boolean (2, 2, q_len, kv_len): causal, blocks, everything, elements at random."""
    rng = np.random.default_rng(q_len + kv_len)
    blocks = rng.random((-(-q_len // 64), -(-kv_len // 64))) < 0.5
    keep = np.tril(np.ones((q_len, kv_len), bool)), np.kron(blocks, np.ones((64, 64), bool))[:q_len, :kv_len]
    return np.stack([*keep, np.ones((q_len, kv_len), bool), rng.random((q_len, kv_len)) < 0.1]).reshape(
        2, 2, q_len, kv_len
    )


@pytest.mark.parametrize("block, rows", [((192, 64), 64), ((192, 128), 128), ((128, 32), 64), ((64, 128), 8)])
@pytest.mark.parametrize("kv_len", [40, 300])
@pytest.mark.parametrize("block_rows, short", [(1, 0), (1, 30), (3, 0), (4, 7)])
def test_rows_come_before_the_others(block, rows, kv_len, block_rows, short):
    (block_m, block_n), q_len = block, block_rows * block[0] - rows - short
    keep = patterns(q_len, kv_len)
    mask = BlockSparseMask.from_dense(keep, block)
    found = with_leading_rows(mask, rows).validate()
    assert found.q_len == q_len + rows and found.n_block_rows == mask.n_block_rows == block_rows
    dense = found.to_dense()
    np.testing.assert_array_equal(dense[..., rows:, :], keep)
    # A block is full where all rows that it had are.
    had = np.zeros((2, 2, block_m - rows, -(-kv_len // block_n) * block_n), bool)
    had[..., : min(q_len, block_m - rows), :kv_len] = keep[..., : block_m - rows, :]
    full = had.reshape(2, 2, block_m - rows, -1, block_n).all(axis=(2, 4))
    np.testing.assert_array_equal(dense[..., :rows, :], full.repeat(block_n, 2)[..., None, :kv_len].repeat(rows, 2))
    again = BlockSparseMask.from_dense(dense, block)
    assert again.n_patterns < found.n_patterns or again == found


def test_no_rows_are_the_mask_itself():
    mask = BlockSparseMask.from_dense(np.eye(100, dtype=bool), (64, 64))
    assert with_leading_rows(mask, 0) is mask


def test_a_mask_that_keeps_nothing():
    mask = BlockSparseMask.from_dense(np.zeros((100, 90), bool), (192, 64))
    found = with_leading_rows(mask, 64).validate()
    assert found.is_empty and found.q_len == 164
