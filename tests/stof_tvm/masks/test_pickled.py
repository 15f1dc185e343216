"""Masks and rules that are copied, and that another process reads."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from stof_tvm import masks
from stof_tvm.masks import runtime

KEEP = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) > 0.5
MASKS = [
    masks.causal(align="bottom-right"),
    masks.sliding_window(5, causal=True),
    masks.everything(),
    masks.dilated_window(5, 3),
    masks.global_tokens([0, 31]),
    masks.prefix_lm(9),
    masks.document([12, 20]),
    masks.document([12, 18], rest=2),
    masks.document([12, 18], inside=masks.a_shape(1, 4), rest=2),
    masks.padding([7]),
    masks.padding([7, 9]),
    masks.longformer(),
    masks.bigbird(3, [1], random_fill=0.3, block=8, seed=7),
    masks.strided(5),
    masks.fixed(8, 2),
    masks.a_shape(2, 9),
    masks.vertical_slash([3, 6], [0]),
    masks.sliding_tile((4, 8), (2, 4), (2, 8), order="row-major"),
    masks.neighborhood((4, 8), (3, 3), (1, 2), (True, False), tile=(2, 4)),
    masks.radial((4, 8)),
    masks.reordered(masks.causal(), torch.arange(31, -1, -1)),
    masks.from_tensor(KEEP),
    masks.from_tensor(KEEP[0, 0]),
    masks.block_sparse(KEEP[0, 0, :4, :2], (8, 16)),
    masks.per_head([masks.causal(), ~masks.strided(3)]) & (masks.causal() | masks.sliding_window(2)),
]
RULES = [
    runtime.top_blocks(2, block=(32, 64), causal=True),
    runtime.top_blocks(2, pool="bounds"),
    runtime.vertical_slash(9, 9, last=5, sinks=1, window=1),
    runtime.xattention(mass=0.5),
    runtime.flex_prefill(least=1),
    runtime.sparge(0.5, causal=True),
    runtime.flash_prefill(0.3, 1, 1, 1),
    runtime.low_rank(k=1) & masks.sliding_window(80),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_masks(mask):
    hash(mask)  # computes an identity, which is not a part of the copy
    for other in (pickle.loads(pickle.dumps(mask)), copy.copy(mask), copy.deepcopy(mask)):
        assert other == mask and hash(other) == hash(mask) and repr(other) == repr(mask)
        assert torch.equal(other.dense(32), mask.dense(32))


@pytest.mark.parametrize("rule", [*RULES, runtime.per_head([*RULES[3:], masks.causal()])], ids=repr)
def test_rules(rule):
    q, k = torch.randn(2, 2, 6, 150, 16, generator=torch.Generator().manual_seed(0))
    for other in (pickle.loads(pickle.dumps(rule)), copy.copy(rule), copy.deepcopy(rule)):
        assert repr(other) == repr(rule) and other.within == rule.within
        assert torch.equal(other.block_map(q, k), rule.block_map(q, k))
        assert (other.identity == rule.identity) == (rule in RULES or other.function is rule.function)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.from_mask_mod(lambda b, h, i, j: i >= j),
        lambda: masks.from_mask_mod(lambda b, h, i, j: i >= j + h, heads=2),
        lambda: masks.from_block_mask(create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")),
    ],
)
def test_masks_of_functions(make):
    """They are copied, and are no files: what a function reads is not known."""
    mask = make()
    assert copy.deepcopy(mask) is mask
    with pytest.raises(pickle.PicklingError, match="cannot be pickled: "):
        pickle.dumps(mask)
