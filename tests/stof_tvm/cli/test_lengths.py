"""Lengths to time, and inputs of other lengths."""

import argparse

import pytest
import torch

from stof_tvm.cli.lengths import COUNT, Lengths, lengths
from stof_tvm.cli.range_times import at_length, dynamic_shapes, percentile


def test_a_range_has_random_lengths():
    some = lengths("128:4096")
    assert (some.least, some.most) == (128, 4096) and len(set(some.timed)) == COUNT
    assert all(128 <= n <= 4096 for n in some.timed) and some == lengths("128:4096")
    assert len(lengths("128:4096:50").timed) == 50 and sorted(lengths("3:5:50").timed) == [3, 4, 5]


def test_lengths_that_are_given():
    assert lengths("512,128,512") == Lengths(128, 512, (512, 128))
    with pytest.raises(argparse.ArgumentTypeError, match="300 must be less than 200"):
        lengths("300:200")


def test_inputs_of_another_length_are_the_examples():
    ids, keep, scale = torch.arange(6).view(2, 3), torch.ones(2, 3), torch.ones(3)
    inputs = {"ids": ids, "keep": keep, "scale": scale, "flag": True}
    longer = at_length(inputs, 3, 5)
    assert longer["ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]] and longer["keep"].shape == (2, 5)
    assert longer["scale"] is scale and longer["flag"] is True
    assert at_length((ids,), 3, 2)[0].tolist() == [[0, 1], [3, 4]]
    shapes = dynamic_shapes(inputs, 3, Lengths(2, 9, (2, 9)))
    assert shapes["scale"] is None and shapes["flag"] is None
    assert shapes["ids"].keys() == shapes["keep"].keys() == {1} and shapes["ids"][1] is shapes["keep"][1]


def test_a_percentile():
    assert percentile([3.0]) == 3.0
    assert percentile([float(n) for n in range(101)]) == 99.0
