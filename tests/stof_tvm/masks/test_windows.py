"""Masks by distance: what they keep at each distance, and how far they reach."""

import math

import pytest
import torch

from stof_tvm import masks
from stof_tvm.masks.part import Part
from stof_tvm.masks.windows import kept_distances, reach

LENGTH = 16
OWNERS = torch.arange(2 * LENGTH) // 6
TABLE = torch.arange(2 * LENGTH) < 4  # of distances


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.sliding_window(3),
        masks.everything(),
        masks.dilated_window(2, 3),
        ~masks.causal(),
        masks.causal() & ~masks.sliding_window(2) | masks.dilated_window(1, 4),
        masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 5)),
        masks.from_mask_mod(lambda b, h, q, k: q >= 0),  # not even by distance
    ],
    ids=repr,
)
def test_what_a_mask_keeps_at_each_distance(mask):
    keeps = kept_distances(mask, 7)
    distance = torch.arange(7) - torch.arange(7)[:, None]
    assert torch.equal(torch.from_numpy(keeps)[distance + 6], mask.dense(7))


def backward(b, h, q, k):
    return (q >= k) & (q - k < 5)


def around(b, h, q, k):
    return ((q - k).abs() <= 3) & ((q - k) % 2 == 0)


def everything(b, h, q, k):
    return q >= 0


WINDOW, BACK = masks.sliding_window(3), masks.sliding_window(4, causal=True)
REACHES = {
    "causal": (masks.causal(), (math.inf, 0)),
    "causal from the end": (masks.causal("bottom-right"), (math.inf, 0)),
    "what is not causal": (~masks.causal(), (0, math.inf)),
    "a window": (WINDOW, (3, 3)),
    "a causal window": (BACK, (4, 0)),
    "a window of one token": (masks.sliding_window(0), (0, 0)),
    "a window longer than all": (masks.sliding_window(40), (math.inf, math.inf)),
    "a window of all but one token": (masks.sliding_window(LENGTH - 2), (LENGTH - 2, LENGTH - 2)),
    "a dilated window": (masks.dilated_window(2, 3), (6, 6)),
    "both of two": (WINDOW & BACK, (3, 0)),
    "one of two": (WINDOW | BACK, (4, 3)),
    "a causal one within a window": (masks.causal() & WINDOW, (3, 0)),
    "what is outside a window": (~WINDOW, (math.inf, math.inf)),
    "a window with a hole": (BACK & ~masks.sliding_window(1), (4, 0)),
    "only what is behind": (WINDOW & ~masks.causal(), (0, 3)),
    "a part from the first row and column on": (Part(BACK, 0, 0, 2 * LENGTH), (4, 0)),
    "another for each head": (masks.per_head([BACK, masks.sliding_window(1), WINDOW]), (4, 3)),
    "a head that keeps all before it": (masks.per_head([BACK, masks.causal()]), (math.inf, 0)),
    "a function": (masks.from_mask_mod(backward), (4, 0)),
    "a function with holes": (masks.from_mask_mod(around), (2, 2)),
    "a function of all": (masks.from_mask_mod(everything), (math.inf, math.inf)),
    "a function for each head": (masks.from_mask_mod(lambda b, h, q, k: abs(q - k) <= h + 1, heads=3), (3, 3)),
    "a function beside a window": (masks.from_mask_mod(around) | BACK, (4, 2)),
    "a part of a function": (Part(masks.from_mask_mod(backward), 0, 0, 2 * LENGTH), (4, 0)),
    "a function that looks up places": (masks.from_mask_mod(lambda b, h, q, k: OWNERS[q] == OWNERS[k]), None),
    "a function of some keys": (masks.from_mask_mod(lambda b, h, q, k: k < 5), None),
    "a function of places in a part": (
        Part(masks.from_mask_mod(lambda b, h, q, k: (q - k < 3) | (k >= LENGTH)), 0, 0, 2 * LENGTH),
        None,
    ),
    "a function that is no formula": (
        masks.from_mask_mod(lambda b, h, q, k: torch.isin((q - k).view(1), torch.arange(3))[0]),
        None,
    ),
    "keys of all": (WINDOW | masks.global_tokens([5]), None),
    "documents": (masks.causal() & masks.document([6, 10]), None),
    "a head that does not go by distance": (masks.per_head([BACK, masks.global_tokens([5])]), None),
    "a tensor": (masks.from_tensor(BACK.dense(LENGTH)), None),
    "nothing": (BACK & ~masks.causal(), None),
    "nothing of a head beside a window of another": (masks.per_head([BACK, BACK & ~masks.causal()]), (4, 0)),
}


@pytest.mark.parametrize("name", REACHES)
def test_how_far_before_and_behind_its_query_a_key_is_kept(name):
    mask, expected = REACHES[name]
    assert reach(mask, LENGTH) == expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in REACHES.items() if expected is not None])
def test_within_its_reach_a_mask_is_the_same_in_all_places(name):
    """What shorter lengths keep is what any rows and columns of the whole mask do."""
    mask, _ = REACHES[name]
    for b, h in ((b, h) for b in range(mask.batch or 1) for h in range(mask.heads or 1)):
        keep, shorter = mask.dense(LENGTH).expand(1, mask.heads or 1, LENGTH, LENGTH), mask.dense(LENGTH - 5)
        assert torch.equal(keep[b, h, 5:, 5:], shorter.expand(1, mask.heads or 1, LENGTH - 5, LENGTH - 5)[b, h])
