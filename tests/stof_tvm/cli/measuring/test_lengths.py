"""Lengths to time."""

import argparse

import pytest

from stof_tvm.cli.measuring.lengths import COUNT, Lengths, lengths


def test_a_range_has_random_lengths():
    some = lengths("128:4096")
    assert (some.least, some.most) == (128, 4096) and len(set(some.timed)) == COUNT
    assert all(128 <= n <= 4096 for n in some.timed) and some == lengths("128:4096")
    assert len(lengths("128:4096:50").timed) == 50 and sorted(lengths("3:5:50").timed) == [3, 4, 5]


def test_lengths_that_are_given():
    assert lengths("512,128,512") == Lengths(128, 512, (512, 128))
    with pytest.raises(argparse.ArgumentTypeError, match="300 must be less than 200"):
        lengths("300:200")
