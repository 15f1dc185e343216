"""Ratios of times that were taken in turns, and when they are not to be trusted."""

import pytest

from stof_tvm.cli.measuring.ratio import UNSURE, ratio_of, ratio_text


def row(*samples):
    return {"samples_ms": [float(x) for x in samples]}


def test_the_ratio_is_that_of_rounds():
    found = ratio_of(row(1, 1, 1, 1, 1), row(2, 2.1, 2.2, 2.3, 2.4))
    assert found == {"median": pytest.approx(2.2), "quartiles": pytest.approx([2.1, 2.3]), "is_sure": True}
    assert ratio_text(found) == "2.20, in half of the rounds 2.10 … 2.30"


def test_a_load_that_slows_both_leaves_their_ratio():
    """What counts is the spread of the ratio: a clock that falls slows both calls of a round."""
    found = ratio_of(row(1, 2, 4, 8, 16), row(2, 4, 8, 16, 32))
    assert found["is_sure"] and found["quartiles"] == [2, 2]


@pytest.mark.parametrize(
    ("times", "is_sure"), [((2, 2, 2.2, 2.4, 2.4), True), ((2, 2, 2.2, 2.6, 2.6), False), ((1, 2, 3, 40, 50), False)]
)
def test_ratios_that_spread_are_unsure(times, is_sure):
    found = ratio_of(row(1, 1, 1, 1, 1), row(*times))
    assert found["is_sure"] == is_sure
    assert ratio_text(found).startswith(UNSURE) != is_sure


def test_a_busy_machine_makes_any_ratio_unsure():
    found = ratio_of(row(1, 1), row(2, 2), busy="other processes kept 2 of 2 cores busy")
    assert ratio_text(found) == f"{UNSURE}: in half of the rounds 2.00 … 2.00; do not quote it"


def test_one_round_tells_no_spread():
    assert ratio_of(row(1), row(2)) == {"median": 2, "quartiles": [2, 2], "is_sure": False}
