"""Sliding tiles of row-major tokens know the order in which their blocks are full or empty."""

import pytest
import torch

from stof_tvm import masks
from stof_tvm.masks.canvas.wanted_order import in_tile_order

CANVAS, TILE = (3, 4, 5), (2, 3, 2)
NEAR = masks.sliding_tile(CANVAS, TILE, (2, 3, 4), 3, "row-major", True)
FAR = masks.sliding_tile(CANVAS, TILE, (4, 3, 4), 3, "row-major", True)
OTHER = masks.sliding_tile(CANVAS, (1, 2, 2), (3, 2, 2), 3, "row-major", True)


@pytest.mark.parametrize("mask", [NEAR, masks.per_head([NEAR, FAR])])
def test_the_mask_in_its_order_is_the_mask_reordered(mask):
    order, moved = in_tile_order(mask)
    places = torch.from_numpy(order)
    expected = mask.dense(63)[..., places, :][..., places]
    assert torch.equal(moved.dense(63), expected) and not torch.equal(moved.dense(63), mask.dense(63))
    assert in_tile_order(moved) is None


def test_masks_that_know_none():
    mixed = masks.per_head([NEAR, OTHER])
    for mask in (mixed, masks.per_head([NEAR, masks.causal()]), masks.causal(), ~NEAR, NEAR & masks.causal()):
        assert in_tile_order(mask) is None
