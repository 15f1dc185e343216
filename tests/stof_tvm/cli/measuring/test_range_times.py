"""Inputs of other lengths, and percentiles; whole answers are tested in test_bench.py."""

import pytest
import torch

from stof_tvm.cli.measuring import range_times
from stof_tvm.cli.measuring.lengths import Lengths
from stof_tvm.cli.measuring.range_times import at_length, dynamic_shapes, percentile, text
from stof_tvm.cli.measuring.ratio import UNSURE
from stof_tvm.errors import InputError


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


@pytest.mark.parametrize(
    ("is_sure", "shown"),
    [(True, "2.00"), (False, "? 1.00 … 3.00")],
)
def test_ratios_that_are_unsure_are_no_numbers(is_sure, shown):
    times = {"length": 24, "first_ms": 1.0, "median_ms": 1.0, "p99_ms": 1.0}
    ratio = {"median": 2.0, "quartiles": [1.0, 3.0], "is_sure": is_sure}
    rows = [{**times, "system": "stof", "ratio": None}, {**times, "system": "eager", "ratio": ratio}]
    lines = text({"device": "this", "mode": "ahead", "range": [24, 24], "lengths": rows})
    assert lines[2].endswith(f" {shown}") and any(UNSURE in line for line in lines) == ("?" in shown)


def test_a_percentile():
    assert percentile([3.0]) == 3.0
    assert percentile([float(n) for n in range(101)]) == 99.0


def test_a_length_that_pytorch_does_not_compute_is_one_error():
    """A model of a library has no lines of the user's own, which the command would show."""
    with pytest.raises(InputError, match=r"eager PyTorch fails on inputs of \(1, 9\): IndexError: index out of range"):
        range_times._eager(torch.nn.Embedding(4, 2), (torch.full((1, 9), 4),), {})
