"""from_tensor and block_sparse: what they read, share and refuse."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask


@pytest.mark.parametrize("shape", [(97, 97), (113, 203), (3, 33, 20), (2, 1, 33, 20), (1, 4, 33, 20), (2, 3, 33, 20)])
def test_from_tensor(shape):
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., 8:24, :16] = True
    mask = masks.from_tensor(keep)
    full = keep.reshape((1,) * (4 - keep.dim()) + shape)
    assert (mask.batch or 1, mask.heads or 1) == full.shape[:2]
    dense = mask.dense(*shape[-2:])
    assert torch.equal(dense.reshape(shape), keep)
    for block in [(8, 8), (16, 32), (128, 64)]:
        assert mask.compile(*shape[-2:], block) == BlockSparseMask.from_dense(full.numpy(), block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_additive_form(dtype):
    keep = torch.rand(2, 1, 20, 30) < 0.5
    additive = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, float("-inf"))
    assert masks.from_tensor(additive) == masks.from_tensor(keep)
    assert masks.from_tensor(-torch.zeros(4, 4)).density(4) == 1


def test_later_changes_do_not_matter():
    keep = torch.ones(16, 16, dtype=torch.bool)
    mask = masks.from_tensor(keep)
    keep[:] = False
    assert mask.dense(16).all() and mask.density(16) == 1


def test_transposed_and_sliced_views():
    keep = torch.rand(40, 30) < 0.5
    assert torch.equal(masks.from_tensor(keep.T).dense(30, 40), keep.T)
    assert masks.from_tensor(keep[3:, ::2]) == masks.from_tensor(keep[3:, ::2].contiguous())


def test_expanded_views_are_not_materialised():
    rows = torch.rand(2, 1, 1, 50) < 0.5
    mask = masks.from_tensor(rows.expand(2, 8, 40, 50))
    assert (mask.batch, mask.heads) == (2, None)
    assert torch.equal(mask.dense(40, 50), rows.expand(2, 1, 40, 50))
    with pytest.raises(MaskError, match="does not fit"):
        mask.dense(41, 50)
    huge = masks.from_tensor(torch.ones(1, 1, dtype=torch.bool).expand(1 << 16, 1 << 16))
    assert huge.bind(1 << 16, 1 << 16).cell_rows(0, 1000).shape == (1, 1 << 16)
    assert huge.density(1 << 16) == 1


def test_a_side_of_one_broadcasts():
    columns = torch.rand(2, 1, 1, 50) < 0.5
    mask = masks.from_tensor(columns)
    for q_len in (1, 7, 40):
        assert torch.equal(mask.dense(q_len, 50), columns.expand(2, 1, q_len, 50))
    compiled = mask.compile(40, 50, (8, 16))
    assert compiled == BlockSparseMask.from_dense(columns.expand(2, 1, 40, 50).numpy(), (8, 16))


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.tensor([[0.0, float("nan")]]), r"holds NaN at index \(0, 1\)"),
        (torch.tensor([[0.0, -1e9]]), r"holds -1000000000.0 at index \(0, 1\); a floating-point mask is 0 .* or -inf"),
        (torch.tensor([[0.0, float("inf")]]), r"holds inf at index \(0, 1\)"),
        (torch.ones(3, 3, dtype=torch.int64), "must be boolean, or floating point with 0 and -inf, got int64"),
        (torch.ones(3, dtype=torch.bool), r"2 to 4 dimensions, none of them 0, got shape \(3,\)"),
        (torch.ones(3, 0, dtype=torch.bool), r"got shape \(3, 0\)"),
        (torch.ones(1, 1, 1, 3, 3, dtype=torch.bool), "2 to 4 dimensions"),
        ("causal", "must be boolean"),
        ([[True], [True, False]], "mask must be a tensor or an array, got list"),
    ],
)
def test_from_tensor_refuses(tensor, message):
    with pytest.raises(MaskError, match=message):
        masks.from_tensor(tensor)


def test_from_tensor_at_other_lengths():
    mask = masks.from_tensor(torch.ones(9, 8, dtype=torch.bool))
    for lengths in [(9, 9), (10, 8), (8, 9)]:
        with pytest.raises(MaskError, match=r"a mask of shape \(9, 8\) does not fit \(q_len, kv_len\) = "):
            mask.compile(*lengths)


@pytest.mark.parametrize("block", [1, 5, 16, 64, (16, 8), (7, 40)])
@pytest.mark.parametrize("lengths", [(97, 97), (113, 203)])
def test_block_sparse(block, lengths):
    height, width = block if isinstance(block, tuple) else (block, block)
    q_len, kv_len = lengths
    layout = np.random.default_rng(0).random((-(-q_len // height), -(-kv_len // width))) < 0.3
    expected = np.array([[layout[i // height, j // width] for j in range(kv_len)] for i in range(q_len)])
    mask = masks.block_sparse(torch.from_numpy(layout).int(), block)
    np.testing.assert_array_equal(mask.dense(q_len, kv_len).numpy(), expected)
    for compiled_block in [(8, 8), (16, 32), (128, 64)]:
        compiled = mask.compile(q_len, kv_len, compiled_block)
        assert compiled == BlockSparseMask.from_dense(expected, compiled_block)


def test_block_sparse_per_head_and_batch():
    layout = np.random.default_rng(1).random((2, 3, 5, 4)) < 0.5
    mask = masks.block_sparse(layout, 8)
    assert (mask.batch, mask.heads) == (2, 3)
    dense = mask.dense(40, 32).numpy()
    np.testing.assert_array_equal(dense, layout.repeat(8, axis=2).repeat(8, axis=3))
    assert mask.compile(40, 32, (16, 16)) == BlockSparseMask.from_dense(dense, (16, 16))


@pytest.mark.parametrize(
    "layout, block, message",
    [
        (np.full((2, 2), 2), 8, "layout must be boolean or 0 and 1, got 2"),
        (np.full((2, 2), np.nan), 8, "layout must be boolean or 0 and 1, got nan"),
        (np.full((2, 2), "a"), 8, "layout must be boolean or 0 and 1, got"),
        (np.ones(2, bool), 8, "a layout has 2 to 4 dimensions"),
        (np.ones((2, 2), bool), 0, "block height=0 must be an integer of at least 1"),
        (np.ones((2, 2), bool), (8, -8), "block width=-8 must be"),
        (np.ones((2, 2), bool), (8, 8, 8), "block height=.8, 8, 8. must be"),
    ],
)
def test_block_sparse_refuses(layout, block, message):
    with pytest.raises(MaskError, match=message):
        masks.block_sparse(layout, block)


def test_block_sparse_at_other_lengths():
    with pytest.raises(MaskError, match=r"has shape \(2, 2\), must have \(3, 2\) at .* = \(17, 16\)"):
        masks.block_sparse(np.ones((2, 2), bool), 8).compile(17, 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_of_zeros_and_ones_is_told_its_remedy(dtype):
    with pytest.raises(MaskError, match=r"one of 1 \(kept\) and 0 is mask.bool\(\)"):
        masks.from_tensor(torch.eye(4).to(dtype))
