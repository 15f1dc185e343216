"""Rows of processes that build or load an engine."""

import pytest
import torch

from benchmarks.gpu_replay import STEPS, check, line_of, row_of
from benchmarks.models.cases import ModelCase

CASE = ModelCase("bert", 1, 128)
FACTS = {"gpu": "NVIDIA H200"}


def run(ready: float, first_call: float) -> dict:
    return {**dict.fromkeys(STEPS, 1.0), "ready_s": ready, "first_call_s": first_call, "from_log": 7}


def test_medians_of_the_processes_against_what_is_wanted():
    row = row_of("load", [run(1.0, 0.5), run(9.0, 0.6), run(2.0, 0.7)], CASE, FACTS)
    assert (row["ready_s"], row["first_call_s"], row["from_log"]) == (2.0, 0.6, 7)
    assert "2.60 s, at most 3 wanted: met" in line_of(row)
    assert "not met" in line_of(row_of("load", [run(3.0, 0.5)], CASE, FACTS))
    assert "wanted" not in line_of(row_of("warm", [run(3.0, 0.5)], CASE, FACTS))


def test_a_failure_is_the_row():
    row = row_of("cold", [{"failed": "no GPU"}], CASE, FACTS)
    assert row["failed"] == "no GPU" and "no GPU" in line_of(row)


def test_results_must_agree():
    check(torch.ones(3), torch.ones(3) + 1e-3)
    with pytest.raises(SystemExit, match="off by"):
        check(torch.ones(3), torch.zeros(3) + 0.5)
    with pytest.raises(SystemExit, match="off by nan"):
        check(torch.full((3,), float("nan")), torch.ones(3))
