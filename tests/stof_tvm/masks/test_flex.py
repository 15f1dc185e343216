"""FlexAttention's mask_mod functions and BlockMasks give the masks that PyTorch computes from them."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from stof_tvm import masks
from stof_tvm.masks import compilation, flex
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask

OWNER = torch.arange(300) // 37
LAYOUT = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) < 0.4
LENGTHS = torch.tensor([97, 10, 50])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 9


def same_document(b, h, q_idx, kv_idx):
    return OWNER[q_idx] == OWNER[kv_idx]


def chained_index(b, h, q_idx, kv_idx):
    return LAYOUT[q_idx // 16][kv_idx // 16]


def padded(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


def dilated_by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (h + 1) == 0


MODS = [causal, window, same_document, chained_index, noop_mask, and_masks(causal, window), or_masks(causal, window)]


@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.__name__)
@pytest.mark.parametrize("lengths", [(97, 97), (113, 203)])
def test_mask_mod(mod, lengths):
    expected = create_mask(mod, None, None, *lengths, device="cpu")[0, 0]
    mask = masks.from_mask_mod(mod)
    assert (mask.batch, mask.heads) == (None, None)
    assert torch.equal(mask.dense(*lengths), expected)
    for block in [(8, 8), (16, 32), (128, 64)]:
        assert mask.compile(*lengths, block) == BlockSparseMask.from_dense(expected.numpy(), block)


@pytest.mark.parametrize(
    "mod, sizes", [(padded, (3, None)), (dilated_by_head, (None, 4)), (and_masks(padded, dilated_by_head), (3, 2))]
)
def test_mask_mod_of_batch_and_head(mod, sizes):
    batch, heads = sizes
    mask = masks.from_mask_mod(mod, batch=batch, heads=heads)
    assert (mask.batch, mask.heads) == sizes
    expected = create_mask(mod, batch, heads, 41, 97, device="cpu")
    assert torch.equal(mask.dense(41, 97), expected)
    assert mask.compile(41, 97, (16, 16)) == BlockSparseMask.from_dense(expected.numpy(), (16, 16))


def test_mask_mod_composes_and_compares():
    mask = masks.from_mask_mod(causal) & masks.sliding_window(9)
    assert torch.equal(mask.dense(97), create_mask(and_masks(causal, window), 1, 1, 97, 97, device="cpu")[0, 0])
    assert mask == masks.from_mask_mod(causal) & masks.sliding_window(9)
    assert masks.from_mask_mod(causal) != masks.from_mask_mod(window)
    assert masks.from_mask_mod(padded, batch=2) != masks.from_mask_mod(padded, batch=3)
    assert repr(mask) == "from_mask_mod(causal) & sliding_window(9)"
    assert repr(masks.from_mask_mod(padded, batch=3)) == "from_mask_mod(padded, batch=3)"


def test_mask_mod_is_evaluated_in_chunks(monkeypatch):
    sizes = []

    def spy(mod, n, one, rows, columns, device):
        sizes.append(n * one * rows * columns)
        return create_mask(mod, n, one, rows, columns, device)

    monkeypatch.setattr(flex, "create_mask", spy)
    # Rows of a table, of which no formula is known.
    masks.from_mask_mod(lambda b, h, q_idx, kv_idx: LAYOUT[q_idx // 128][kv_idx // 128]).compile(2048)
    assert sum(sizes) == 2048**2 and max(sizes) <= compilation.CHUNK_ELEMENTS
    sizes.clear()
    table = masks.from_mask_mod(lambda b, h, q_idx, kv_idx: LAYOUT[q_idx // 120][kv_idx // 120])
    (table & masks.sliding_window(20)).compile(2048)
    assert sum(sizes) <= 3 * 32 * 64 * 64, "blocks that the window empties must not be evaluated"


def fails(b, h, q_idx, kv_idx):
    raise KeyError("no such table")


def fails_inside_of_torch(b, h, q_idx, kv_idx):
    """As PyTorch does where an index of uint8, which it takes for a mask, makes a warning within vmap."""
    raise SystemError("returned a result with an exception set") from UserWarning("indexing with dtype torch.uint8")


@pytest.mark.parametrize(
    "mod, message",
    [
        (fails, "mask_mod fails failed: KeyError: 'no such table'"),
        (fails_inside_of_torch, "failed: UserWarning: indexing with dtype torch.uint8"),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx, "must return a boolean, returned torch.int64"),
        (lambda b, h, q_idx, kv_idx: OWNER[q_idx + 300] == 0, "failed: IndexError"),
    ],
)
def test_mask_mod_that_fails(mod, message):
    with pytest.raises(MaskError, match=message):
        masks.from_mask_mod(mod).dense(97)


def test_refused():
    with pytest.raises(MaskError, match="mask_mod must be a function of .*, got Tensor"):
        masks.from_mask_mod(torch.ones(3, 3))
    with pytest.raises(MaskError, match="heads=0 must be an integer of at least 1"):
        masks.from_mask_mod(causal, heads=0)
    with pytest.raises(MaskError, match="from_block_mask needs a BlockMask, got function"):
        masks.from_block_mask(causal)


@pytest.mark.parametrize("block_size", [128, (64, 32), 512])
@pytest.mark.parametrize(
    "mod, sizes, lengths",
    [
        (causal, (None, None), (97, 97)),
        (and_masks(causal, same_document), (None, None), (257, 203)),
        (and_masks(padded, dilated_by_head), (3, 2), (113, 97)),
    ],
)
def test_block_mask(mod, sizes, lengths, block_size):
    block_mask = create_block_mask(mod, *sizes, *lengths, device="cpu", BLOCK_SIZE=block_size)
    expected = create_mask(mod, *sizes, *lengths, device="cpu")
    mask = masks.from_block_mask(block_mask)
    assert (mask.batch, mask.heads) == sizes
    assert torch.equal(mask.dense(*lengths).reshape(expected.shape), expected)
    assert mask.compile(*lengths, (16, 64)) == BlockSparseMask.from_dense(expected.numpy(), (16, 64))


def test_block_mask_made_by_hand():
    """Full blocks are kept whole, partial blocks go through the mask_mod, blocks not listed are not kept."""
    counts, columns = torch.tensor([[[1, 0]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    full_counts, full_columns = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    block_mask = BlockMask.from_kv_blocks(
        counts.int(), columns.int(), full_counts.int(), full_columns.int(), BLOCK_SIZE=16, mask_mod=window
    )
    expected = np.zeros((32, 32), bool)
    for i, j in np.ndindex(32, 32):
        if i < 16 <= j:
            expected[i, j] = abs(i - j) <= 9
        expected[i, j] |= i >= 16 and j >= 16
    mask = masks.from_block_mask(block_mask)
    np.testing.assert_array_equal(mask.dense(32).numpy(), expected)


def test_block_mask_fits_its_lengths_only():
    mask = masks.from_block_mask(create_block_mask(causal, None, None, 97, 97, device="cpu"))
    with pytest.raises(MaskError, match=r"BlockMask for .* = \(97, 97\) does not fit \(98, 97\)"):
        mask.compile(98, 97)


def test_sliced_block_mask():
    block_mask = create_block_mask(padded, 3, 1, 97, 97, device="cpu")
    sliced = block_mask[1]
    with pytest.raises(MaskError, match="sliced BlockMask"):
        masks.from_block_mask(sliced).dense(97)
