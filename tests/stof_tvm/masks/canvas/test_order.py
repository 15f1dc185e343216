"""The order of tiles, and masks seen through orders."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from tests.stof_tvm.masks.canvas.tokens import places, tile_by_tile
from tir_kernels.errors import MaskError


@pytest.mark.parametrize("canvas, tile", [((4, 6), (2, 3)), ((5, 7, 3), (2, 4, 5)), ((1, 9), 4), ((9,), 2)], ids=str)
@pytest.mark.parametrize("text, first", [(0, False), (3, False), (4, True)])
def test_order_of_tiles(canvas, tile, text, first):
    found = masks.tile_order(canvas, tile, text, first)
    tokens = places(canvas)
    words = [("text", k) for k in range(text)]
    sequence = words + tokens if first else tokens + words
    moved = list(tile_by_tile(canvas, tile if isinstance(tile, tuple) else (tile,) * len(canvas)))
    assert [sequence[k] for k in found.order] == (words + moved if first else moved + words)
    assert found.order.dtype == torch.int64 and found.order[found.inverse].tolist() == list(range(len(sequence)))


CANVAS, TILE = (5, 6, 7), (2, 4, 4)
ORDER, INVERSE = masks.tile_order(CANVAS, TILE)
RANDOM = torch.from_numpy(np.random.default_rng(5).permutation(210))
MASKS = [
    masks.neighborhood(CANVAS, 3),
    masks.neighborhood(CANVAS, (2, 3, 3), (2, 1, 1)) & masks.causal() | masks.global_tokens([7]),
    ~masks.radial(CANVAS, 0.5),
    masks.bigbird(3, 2, 0.3, block=16),
    masks.strided(12),
    masks.document([100, 10, 100]) & masks.padding([180]),
    masks.from_tensor(torch.rand(210, 210, generator=torch.manual_seed(3)) < 0.1),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("order", [ORDER, INVERSE, RANDOM], ids=["tiles", "back", "random"])
def test_masks_in_another_order(mask, order):
    expected = mask.dense(210)[order][:, order]
    moved = masks.reordered(mask, order)
    assert torch.equal(moved.dense(210), expected)
    for block in ((8, 8), (64, 64), (48, 128)):
        assert (moved.compile(210, block=block).to_dense() == expected.numpy()).all()
    assert (moved.compile(210, block=(16, 16), token_stride=4).to_dense() == expected.numpy()).all()


def test_tiles_seen_row_by_row():
    tiles = masks.sliding_tile(CANVAS, TILE, (2, 4, 4), text=6)
    rows = masks.sliding_tile(CANVAS, TILE, (2, 4, 4), text=6, order="row-major")
    order, inverse = masks.tile_order(CANVAS, TILE, 6)
    assert torch.equal(masks.reordered(tiles, inverse).dense(216), rows.dense(216))
    assert torch.equal(masks.reordered(rows, order).dense(216), tiles.dense(216))
    near = masks.neighborhood(CANVAS, 3, tile=TILE)
    assert torch.equal(masks.reordered(masks.neighborhood(CANVAS, 3), ORDER).dense(210), near.dense(210))


def test_heads_and_equality():
    heads = masks.per_head([masks.causal(), masks.sliding_window(3)])
    moved = masks.reordered(heads, [2, 0, 1, 3])
    assert moved.heads == 2 and torch.equal(moved.dense(4), heads.dense(4)[:, :, [2, 0, 1, 3]][..., [2, 0, 1, 3]])
    assert moved == masks.reordered(heads, np.array([2, 0, 1, 3])) != masks.reordered(heads, [0, 2, 1, 3])
    assert len({moved, masks.reordered(heads, (2, 0, 1, 3))}) == 1
    assert repr(moved) == f"reordered({heads!r}, <order of 4>)"


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ([0, 2], r"order=\[0, 2\] must be a permutation of 0 … length - 1"),
        ([0, 0], "must be a permutation"),
        ([-1, 0], "must be a permutation"),
        ([0.0, 1.0], "must be a permutation"),
        ([], "must be a permutation"),
        (torch.eye(2, dtype=torch.int64), "must be a permutation"),
        (masks.tile_order((2, 3), 2), "order is a TileOrder, which has two"),
    ],
)
def test_what_is_no_order(order, why):
    with pytest.raises(MaskError, match=why):
        masks.reordered(masks.causal(), order)


def test_what_does_not_fit():
    with pytest.raises(MaskError, match="reordered takes a Mask, got Tensor"):
        masks.reordered(torch.ones(3, 3, dtype=torch.bool), [0, 1, 2])
    with pytest.raises(MaskError, match="an order of 3 tokens must have kv_len=4"):
        masks.reordered(masks.causal(), [0, 2, 1]).compile(3, 4)


@pytest.mark.parametrize("canvas, text", [((2**9, 2**9, 2**9), 0), ((2**40, 2**40), 0), ((4, 4), 2**62)])
def test_lengths_beyond_those_of_masks(canvas, text):
    with pytest.raises(MaskError, match=r"canvas=\(.* and text=.* are more tokens than 67108864"):
        masks.tile_order(canvas, 2, text)
