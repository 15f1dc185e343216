"""Rows of searches: what they are compared by, and how one that went on becomes one row."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.gpu_tuning import gone_on, planned
from benchmarks.simulate_search import TRIALS, Kernel, fitted_model, trials_until
from benchmarks.tuning.report import joined, page, reached, row_of, summary
from benchmarks.tuning.variants import VARIANTS

FACTS = {"gpu": "NVIDIA H200", "driver": "1", "date": "2026-11-21", "commit": "abc", "run": "r"}
PHASES = {"model": 8.0, "stage_one": 1.0, "stage_two": 9.0, "waiting": 5.0, "deciding": 0.2}


def searched(us: list[float | None], default_us=100.0, known_us=None) -> dict:
    """Data of a search with these latencies after its trials, one a second."""
    history = [
        {"number": i, "seconds": float(i), "us": 1.0, "is_cached": False, "model_us": x} for i, x in enumerate(us, 1)
    ]
    best = {"us": min(x for x in us if x), "default_us": default_us, "known_us": known_us, "scheme": "0x5"}
    return {"history": history, "best": best, "seconds": PHASES, "tasks": [], "steps": []}


def row(variant="stof", *arguments, **options) -> dict:
    return row_of(variant, "1x128", searched(*arguments, **options), FACTS)


def test_the_curve_holds_every_new_best():
    assert row("stof", [None, 100.0, 100.0, 96.0, 95.0])["curve"] == [[2, 2.0, 100.0], [4, 4.0, 96.0], [5, 5.0, 95.0]]


def test_what_the_log_knew_is_there_before_the_first_trial():
    again = row("again", [95.0, 90.0], known_us=95.0)
    assert again["curve"] == [[0, 8.0, 95.0], [2, 2.0, 90.0]]
    assert reached(again, 1.05) == (0, 8.0)


def test_searches_are_compared_by_their_gain_over_their_own_defaults():
    """The second process measured everything 4 % slower."""
    rows = [row("long", [100.0, 90.0]), row("stof", [104.0, 104.0, 93.6], default_us=104.0)]
    line = summary(rows).splitlines()[-1]
    assert line == "| 1x128 | stof | 1 | 3 | 3.0 | 3 (3.0) | 3 (3.0) | 3 (3.0) | 1.0× |"


def test_how_many_times_our_trials_another_search_takes():
    rows = [row("stof", [100.0, 90.0]), row("random", [100.0] * 7 + [90.0]), row("evolutionary", [100.0] * 9)]
    assert summary(rows).splitlines()[-2].endswith("| 8 (8.0) | 4.0× |")
    assert summary(rows).splitlines()[-1].endswith("| never | never | never | > 4.5× |")


def test_of_several_seeds_the_median():
    rows = [row("stof", [100.0, 90.0]), *(row("random", [100.0] * n + [90.0]) for n in (3, 5, 11))]
    assert summary(rows).splitlines()[-1] == ("| 1x128 | random | 3 | 6 | 6.0 | 6 (6.0) | 6 (6.0) | 6 (6.0) | 3.0× |")
    rows += [row("random", [100.0]), row("random", [100.0])]  # two of five never arrive
    assert "| random | 5 | 4 | 4.0 | 12 (12.0)" in summary(rows)
    rows += [row("random", [100.0])]
    assert "| random | 6 | 2.5 | 2.5 | never | never" in summary(rows)
    assert page(rows).count("| random |") == 7


def test_a_search_that_went_on_is_one_row():
    both = joined(row("long", [100.0, 90.0]), row("long", [90.0, 91.0, 85.0], known_us=90.0))
    assert both["curve"] == [[1, 1.0, 100.0], [2, 2.0, 90.0], [5, 5.0, 85.0]]
    assert (both["trials"], both["seconds"], both["median_us"], both["parts"]) == (5, 5.0, 85.0, 2)
    assert both["phases_s"]["model"] == 16.0


def test_a_long_search_goes_on_beside_its_log(tmp_path):
    log = tmp_path / "1x128"
    assert gone_on(row("long", [100.0]), log)["trials"] == 1
    assert gone_on(row("long", [90.0, 80.0]), log)["trials"] == 3
    assert gone_on(row_of("long", "1x128", {"failed": "no GPU"}, FACTS), log)["failed"] == "no GPU"
    assert gone_on(row("long", [80.0]), log)["parts"] == 3


def test_the_plan(tmp_path):
    options = argparse.Namespace(
        variants=["no-cache", "stof"], seconds=20.0, trials=9, long=60.0, long_log=Path("here"), seeds=[3, 4]
    )
    long, stof, last = planned(options, "1x128", 3, tmp_path)
    assert (long.label, long.variant, long.seconds, long.log) == ("long", "stof", 60.0, Path("here/1x128"))
    assert stof.label == "stof" and last.label == "no-cache"
    assert VARIANTS["no-cache"].cache is False and stof.log != last.log
    assert [(x.label, x.seed) for x in planned(options, "1x128", 4, tmp_path)] == [("stof", 4), ("no-cache", 4)]


def test_a_search_that_ended_early_or_failed_is_in_the_page_and_not_compared():
    early = searched([None, 100.0])
    early["best"]["us"] = None
    rows = [row("stof", [100.0, 90.0]), row_of("random", "1x128", early, FACTS)]
    assert "ended before" in rows[1]["failed"] and "| random | 0 | failed" in page(rows)
    assert len(summary(rows).splitlines()) == 3


def test_trials_until_a_share_of_the_best():
    class Kernel:
        runs, best_us = 2, 50.0

    assert trials_until([float("inf"), 110.0, 104.0, 101.5], [Kernel]) == [3, 4, None]


def test_simulated_times_are_of_configurations_that_there_are():
    rows = [row for row in json.loads(TRIALS.read_text())["tasks"] if row["tokens"] == 4096 and row["model"] == "bert"]
    kernels = [Kernel(row) for row in rows]
    assert [len(kernel.measured) for kernel in kernels] == [len(row["us"]) for row in rows]
    fitted = fitted_model(kernels)
    for kernel in kernels:
        kernel.draw(fitted, 0)
        assert min(kernel.us.values()) == kernel.best_us and len(kernel.us) == len(kernel.choices)


@pytest.mark.parametrize("variant", ["stof", "again"])
def test_variants_that_only_differ_in_their_log(variant):
    assert VARIANTS[variant] == VARIANTS["stof"]
