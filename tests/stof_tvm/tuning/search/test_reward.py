"""Rewards: what earns a segment more trials."""

import pytest

from stof_tvm.tuning.search.reward import ALPHA, WINDOW, Progress, Reward


def segment(weight=1, *rounds) -> Progress:
    progress = Progress(weight)
    for times in rounds:
        progress.add_round(times)
    return progress


def test_the_equation():
    one = segment(3, [100.0, 90.0], [80.0, None])
    gain, chance = (0 + 10.0 + 10.0 + 0) / 4, 80.0 / 4
    assert Reward().shares([one]) == [pytest.approx(3 * (ALPHA * gain + (1 - ALPHA) * chance))]


def test_what_was_never_tried_comes_first():
    assert Reward().shares([segment(9, [50.0]), segment(1)]) == [0.0, 1.0]


def test_what_gained_gets_more_than_what_did_not():
    gained, stuck = segment(1, [100.0, 99.0], [90.0, 90.0]), segment(1, [90.0, 91.0], [92.0, 95.0])
    better, worse = Reward().shares([gained, stuck])
    assert better > worse > 0


def test_what_runs_more_often_gets_more():
    often, once = Reward().shares([segment(12, [10.0]), segment(1, [10.0])])
    assert often == pytest.approx(12 * once)


def test_what_never_worked_earns_nothing():
    assert Reward().shares([segment(1, [None, None]), segment(1, [5.0])])[0] == 0.0


def test_only_the_last_trials_count_as_gain():
    early = segment(1, [100.0], [50.0], *[[50.0]] * WINDOW)
    assert Reward().shares([early]) == [pytest.approx((1 - ALPHA) * 50.0 / (WINDOW + 2))]
