"""The benchmark of whole models on a CPU: cases and models, rounds, processes that fail, resumed plans, the page."""

import json
import time

import pytest
import torch

from benchmarks import cpu_models
from benchmarks.cpu import process
from benchmarks.cpu.cases import MODELS, make_input, make_model, model_cases
from benchmarks.cpu.report import line, page, ratio_of
from benchmarks.models.cases import ModelCase, tiny
from benchmarks.models.results import ModelResults

BERT = ModelCase("bert", 1, 128, "own", "float32")


def row_of(case, system, us=None, **fields):
    row = {"bench": "models", "gpu": "AMD EPYC", "driver": "6.1", "date": "2026-11-24", "commit": "abc", "run": "one"}
    row |= {"case": case.to_json(None), "system": system}
    if us is not None:
        row |= {"variant": "some", "median_us": us, "wall_us": us, "samples_us": [us], "prepare_s": 9.0}
        row |= {"error": 4e-6, "half_error": 1e-5}
    return row | fields


def test_cases_are_all_that_is_asked_for():
    cases = model_cases()
    assert len(set(cases)) == len(cases) == 10 and {case.dtype for case in cases} == {"float32"}
    assert all(ModelCase.from_row({"case": case.to_json(None)}) == case for case in cases)
    assert make_input(cases[0]).shape == (1, 3, 224, 224)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_one_case_have_the_same_weights(name):
    case = tiny(ModelCase(name, 1, 128, "own", "float32"))
    with torch.no_grad():
        first, second = (make_model(case, small=True)(make_input(case)) for _ in range(2))
    assert torch.equal(first, second) and first.shape[0] == 1


class Scripted:
    """A process whose calls take `us`, or fail after `calls` of them."""

    def __init__(self, system, us, calls=1000):
        self.system, self.us, self.calls, self.failed, self.order = system, us, calls, None, []

    def ask(self, what, _deadline):
        self.calls -= 1
        if self.calls < 0:
            self.failed = "died"
        return None if self.failed else self.us


def test_systems_take_turns(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    asked = []
    systems = [Scripted("stof", 5.0), Scripted("eager", 9.0, calls=2)]
    for one in systems:
        one.ask = lambda what, deadline, one=one, ask=one.ask: asked.append(one.system) or ask(what, deadline)
    samples = cpu_models.take_turns(systems, (4, 4))
    assert asked == ["stof", "eager"] * 4
    assert samples == {"stof": [5.0] * 4, "eager": [9.0] * 2} and systems[1].failed == "died"


@pytest.mark.slow
def test_a_system_that_fails_costs_its_row(tmp_path):
    case = ModelCase("unknown", 1, 32, "own", "float32")
    one = process.Process(case, "eager", 1, tmp_path, True, tmp_path / "log.txt")
    try:
        assert one.receive(time.monotonic() + 120) is None and one.failed.startswith("ValueError")
        assert one.ask("time", time.monotonic() + 120) is None
    finally:
        one.close()


@pytest.mark.slow
def test_dry_run_measures_and_resumes(tmp_path):
    out = tmp_path / "rows.json"
    arguments = ["--dry-run", "--out", str(out), "--model", "bert", "--systems", "stof,eager", "--threads", "1"]
    options = cpu_models.parse_arguments([*arguments, "--folder", str(tmp_path)])
    assert cpu_models.measure(options) == 0
    rows = json.loads(out.read_text())
    assert {row["system"] for row in rows} == {"stof", "eager"} and not any("failed" in row for row in rows)
    assert all(row["error"] <= 2 * row["half_error"] and len(row["samples_us"]) >= 2 for row in rows)
    assert cpu_models.make_plan(options, rows) == []
    assert cpu_models.make_plan(options, rows[:1]) == [tiny(BERT)]
    assert cpu_models.merge([out], tmp_path) == 0


def test_page_lists_losses_wrong_results_and_failures():
    rows = [row_of(BERT, "stof", 2000.0), row_of(BERT, "onnxruntime", 1500.0), row_of(BERT, "eager", 900.0, error=1.0)]
    rows.append(row_of(BERT, "compile-sdpa", failed="RuntimeError: no compiler"))
    results = ModelResults(rows)
    assert ratio_of(results, BERT) == 0.75 and "0.75× onnxruntime" in line(results, BERT)
    text = page(results)
    assert "0.75× bert 1x128 own: 2000 against 1500 of onnxruntime" in text
    assert "eager at bert 1x128 own: 1.0e+00" in text and "RuntimeError: no compiler" in text
    assert "| bert | 1 × 128 | 2.0 | 0.75× | 1.5 (0.75) | – | – |" in text
