"""Where sequences are in a padded batch and on a row of tokens."""

import numpy as np
import pytest
import torch

from stof_tvm.errors import InputError
from stof_tvm.packed.layout import STEP, Layout, layout_of_lengths, layout_of_mask, most_sequences, row_length


def test_rows_grow_by_an_eighth_at_most():
    lengths = sorted({row_length(n) for n in range(1, 40_000)})
    assert lengths[:4] == [64, 128, 192, 256] and all(n % STEP == 0 for n in lengths)
    assert all(b - a <= max(STEP, 0.12 * a) for a, b in zip(lengths, lengths[1:]))
    assert all(row_length(n) >= n and row_length(n) - n < max(STEP, 0.12 * n + STEP) for n in range(1, 9000, 7))
    assert [most_sequences(n) for n in (1, 7, 8, 15, 16, 500)] == [8, 8, 16, 16, 32, 512]


def test_padding_on_either_side():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    layout = layout_of_mask(mask, "attention_mask", 1)
    assert layout == Layout(4, 4, (2, 3, 4, 1), (0, 1, 0, 3))
    assert layout.places().tolist() == mask.flatten().nonzero().flatten().tolist()
    assert layout == layout_of_mask(mask == 0, "key_padding_mask", False) == layout_of_mask(mask.bfloat16(), "m", 1)


def test_vectors():
    vectors = layout_of_lengths(torch.tensor([2, 3]), 2, 5).vectors(8, 4)
    assert {name: x.tolist() for name, x in vectors.items()} == {
        "stof_place": [0, 1, 0, 1, 2, 0, 0, 0],
        "stof_number": [0, 0, 1, 1, 1, 2, 2, 2],
        "stof_first": [0, 0, 2, 2, 2, 5, 6, 7],
        "stof_starts": [0, 2, 5, 5],
        "stof_ends": [1, 4, 7, 7],
    }
    assert all(x.dtype == np.int64 for x in vectors.values())


@pytest.mark.parametrize(
    "mask, told",
    [
        ([[1, 1, 0], [0, 0, 0]], "m calls all of row 1 padding: a sequence has at least one token"),
        ([[1, 0, 1]], "m has padding between the tokens of row 0: sequences must be in one piece"),
        ([[1, 2, 0]], "m holds other values than 0 and 1"),
    ],
)
def test_masks_that_are_refused(mask, told):
    with pytest.raises(InputError, match=told):
        layout_of_mask(torch.tensor(mask), "m", 1)


@pytest.mark.parametrize(
    "lengths, told",
    [
        ([1, 2, 3], "lengths has 3 entries for a batch of 2"),
        ([1, 6], "a length of 6 exceeds the batch's 5 places"),
        ([1, 0], r"lengths\[1\]=0 must be an integer of at least 1"),
        ([1, 2.5], r"lengths\[1\]=2.5 must be an integer of at least 1"),
        (3, "lengths=3 must be a sequence of integers"),
    ],
)
def test_lengths_that_are_refused(lengths, told):
    with pytest.raises(InputError, match=told):
        layout_of_lengths(lengths, 2, 5)
