"""The arrays that the CUDA kernels read, against the dense mask."""

import numpy as np
import pytest

from tir_kernels.attention.block_wise.operands import READ_AHEAD, block_wise_operands
from tir_kernels.attention.block_wise.work import Item
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import H200
from tir_kernels.masks.block_sparse import BlockSparseMask


def problem(keep, batch=1, heads=2):
    return AttentionProblem(batch, heads, heads, *keep.shape[-2:], 64, 64, "float16", 0.125)


def decode(mask, operands, head):
    """The dense mask of one head as a kernel's lanes see it."""
    work, entries, keep_bits, _, _ = operands
    dense = np.zeros((mask.n_block_rows * mask.block_m, mask.n_block_cols * mask.block_n), bool)
    for begin, end, first, _, _, first_row, _, _ in work[work[:, Item.HEAD] == head]:
        assert begin == end or first == entries[begin, 0]
        for first_key, part in entries[begin:end]:
            block = dense[first_row:, first_key:]
            if part < 0:
                block[: mask.block_m, : mask.block_n] = True
                continue
            for m in range(mask.block_m // 16):
                for lane in range(32):
                    for i in range(mask.block_n // 2):
                        row = m * 16 + i % 4 // 2 * 8 + lane // 4
                        col = i // 4 * 8 + lane % 4 * 2 + i % 2
                        block[row, col] = keep_bits[part, m, lane, i // 32] >> (i % 32) & 1
    return dense[: mask.q_len, : mask.kv_len]


@pytest.mark.parametrize("block", [(64, 32), (64, 64), (128, 128)])
@pytest.mark.parametrize("q_len, kv_len", [(97, 97), (113, 203), (256, 128)])
def test_lanes_see_the_dense_mask(q_len, kv_len, block):
    rng = np.random.default_rng(q_len + block[1])
    keep = rng.random((2, q_len, kv_len)) < 0.4
    keep[0, :64, :64] = True
    keep[1, 64:] = False
    mask = BlockSparseMask.from_dense(keep, block)
    operands = block_wise_operands(mask, problem(keep), H200)
    for h in range(2):
        np.testing.assert_array_equal(decode(mask, operands, h), keep[h])


def test_arrays_are_never_empty_and_the_workspace_is_zero():
    for keep in (np.zeros((64, 64), bool), np.ones((64, 64), bool)):
        operands = block_wise_operands(BlockSparseMask.from_dense(keep), problem(keep), H200)
        assert all(array.size and array.flags.c_contiguous for array in operands)
        assert [a.dtype.name for a in operands] == ["int32", "int32", "uint32", "float32", "uint32"]
        assert not operands[3].any() and not operands[4].any()
    assert operands[1].tolist() == [[0, -1]] * (1 + READ_AHEAD)


def test_patterns_are_spread_over_batch_and_heads():
    keep = np.stack([np.eye(64, dtype=bool), np.ones((64, 64), bool)])[:, None]
    mask = BlockSparseMask.from_dense(keep)
    operands = block_wise_operands(mask, problem(keep, batch=2, heads=3), H200)
    for head in range(6):
        np.testing.assert_array_equal(decode(mask, operands, head), keep[head // 3, 0])
