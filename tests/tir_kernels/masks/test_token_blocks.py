"""Blocks of tokens that are apart, against lists written out."""

import numpy as np
import pytest

from tir_kernels.attention.cpu.operands import mask_operands
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.masks.token_blocks import first_tokens, n_token_blocks, positions, token_counts

SHAPES = [(length, block, stride) for length in (1, 7, 64, 100) for block in (8, 32) for stride in (1, 2, 7, 64)]


@pytest.mark.parametrize("length, block, stride", SHAPES)
def test_blocks_hold_every_token_once(length, block, stride):
    first, count = first_tokens(length, block, stride), token_counts(length, block, stride)
    assert len(first) == len(count) == n_token_blocks(length, block, stride)
    held = [first[b] + stride * np.arange(count[b]) for b in range(len(first))]
    assert sorted(np.concatenate(held)) == list(range(length))
    at = positions(length, block, stride)
    for b, tokens in enumerate(held):
        assert list(at[tokens]) == list(range(b * block, b * block + count[b]))


def test_stride_1_is_the_usual_order():
    assert first_tokens(100, 32).tolist() == [0, 32, 64, 96]
    assert token_counts(100, 32).tolist() == [32, 32, 32, 4]


@pytest.mark.parametrize("shape", [(50, 70), (3, 40, 33), (2, 1, 64, 20)])
@pytest.mark.parametrize("stride", [2, 5, 19])
def test_storage_of_tokens_apart_is_well_formed_and_reversible(shape, stride):
    keep = np.random.default_rng(stride).random(shape) < 0.3
    mask = BlockSparseMask.from_dense(keep, (16, 8), stride).validate()
    np.testing.assert_array_equal(mask.to_dense(), keep.reshape((1,) * (4 - keep.ndim) + keep.shape))
    assert mask.density == pytest.approx(keep.mean())
    assert mask != BlockSparseMask.from_dense(keep, (16, 8))


def test_a_bit_past_the_end_of_a_class_is_refused():
    mask = BlockSparseMask.from_dense(np.tril(np.ones((50, 50), bool)), (16, 8), 3)
    mask.bitmap[:] = np.iinfo(np.uint64).max - 1
    with pytest.raises(MaskError, match="past q_len=50|past kv_len=50"):
        mask.validate()


def test_kernels_of_consecutive_tokens_refuse_others():
    mask = BlockSparseMask.from_dense(np.ones((16, 16), bool), (8, 8), 2)
    problem = AttentionProblem(1, 1, 1, 16, 16, 8, 8, "float32", 1.0)
    with pytest.raises(MaskError, match="tokens 2 apart"):
        mask_operands(mask, problem)
