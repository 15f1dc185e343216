"""Counts at every block size against the masks that are compiled for it."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from tir_kernels.masks import block_counts
from tir_kernels.masks.block_counts import FINEST, FineMask
from tir_kernels.masks.leading_rows import with_leading_rows


def patterns(q_len, kv_len):
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    blocks = np.random.default_rng(0).random((-(-q_len // 32), -(-kv_len // 32))) < 0.6
    random_blocks = np.kron(blocks, np.ones((32, 32), bool))[:q_len, :kv_len]
    return np.stack([j <= i, abs(i - j) <= 9, random_blocks, np.ones((q_len, kv_len), bool), (i - j) % 40 == 0])


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 192])
@pytest.mark.parametrize("block_n", [32, 64, 96, 128])
@pytest.mark.parametrize("lengths", [(512, 512), (300, 417), (1, 70), (129, 31)])
@pytest.mark.parametrize("token_stride", [1, 5])
def test_counts_are_those_of_the_compiled_mask(block_m, block_n, lengths, token_stride, monkeypatch):
    monkeypatch.setattr(block_counts, "CHUNK", 40)
    keep = masks.from_tensor(torch.from_numpy(patterns(*lengths)))
    counts = FineMask(keep.compile(*lengths, FINEST, token_stride)).counts(block_m, block_n)
    assert_counted(counts, keep.compile(*lengths, (block_m, block_n), token_stride))


@pytest.mark.parametrize("block_m, leading_rows", [(64, 16), (64, 48), (128, 64), (192, 64), (192, 128)])
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("block_rows, short", [(1, 0), (2, 13), (3, 0)])
def test_counts_with_rows_before_the_first(block_m, leading_rows, block_n, block_rows, short):
    """They are those of the mask that has these rows."""
    length = block_rows * block_m - leading_rows - short
    keep = masks.from_tensor(torch.from_numpy(patterns(length, 417)))
    counts = FineMask(keep.compile(length, 417, FINEST)).counts(block_m, block_n, leading_rows)
    assert_counted(counts, with_leading_rows(keep.compile(length, 417, (block_m, block_n)), leading_rows))


def assert_counted(counts, mask):
    block_m, of_pattern = mask.block_m, slice(None, None, mask.n_block_rows)
    np.testing.assert_array_equal(counts.load.reshape(-1), np.diff(mask.load_row_ptr))
    np.testing.assert_array_equal(counts.part, np.diff(mask.part_row_ptr[of_pattern]))
    strips = mask.bitmap.reshape(len(mask.bitmap), -1, block_m // 16, 2).any(axis=(1, 3)).sum(axis=1)
    ends = np.append(0, np.cumsum(strips))[mask.part_row_ptr[of_pattern]]
    np.testing.assert_array_equal(counts.strips, np.diff(ends))
