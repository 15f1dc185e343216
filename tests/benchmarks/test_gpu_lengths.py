"""The benchmark of lengths: cases, padded inputs, processes that measure several rows, resumed plans, the report."""

import json
import os
import signal
import time

import pytest
import torch

import stof_tvm
from benchmarks import gpu_lengths
from benchmarks.lengths.cases import BATCH, FULL, LENGTH, MEMORY, TINY, LengthCase, length_cases
from benchmarks.lengths.measure import _errors, get_ready
from benchmarks.lengths.models import make_inputs, make_model
from benchmarks.lengths.report import line, page, summary
from benchmarks.lengths.requirements import first_ratio, lines
from benchmarks.lengths.systems import ALL, RANGE, bucket_of, prepare
from benchmarks.models.results import ModelResults
from benchmarks.models.worker import NOT_MEASURED
from tests.benchmarks.test_gpu_models import FakeConnection, worker

SHORT, LONG = LengthCase(LENGTH, "BERT-base", 1, 293), LengthCase(LENGTH, "BERT-base", 1, 4082)
LONGEST = LengthCase(MEMORY, "BERT-base", 1, 4096)
PADDED = LengthCase(BATCH, "BERT-base", 32, 267)


@pytest.fixture
def length_row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, **fields):
        row = {"bench": "lengths", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc"}
        row |= {"run": "one", "case": case.to_json(), "system": system}
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us + 50, "samples_us": [us], "error": 1e-3}
            row |= {"half_error": 2e-3, "prepare_s": 20.0, "first_us": 2 * us}
        return row | fields

    return make


def options(tmp_path, *arguments):
    some = gpu_lengths.parse_arguments(["--out", str(tmp_path / "rows.json"), "--mode", "ahead", *arguments])
    some.log = tmp_path / "log"
    return some


def test_cases_are_all_that_is_asked_for():
    cases = length_cases()
    lengths = FULL.lengths()
    assert len(set(cases)) == len(cases) == 3 * (50 + 1) + 1
    assert len(set(lengths)) == 50 and min(lengths) >= 128 and max(lengths) <= 4096 and lengths == FULL.lengths()
    assert set(FULL.fixed_lengths()) < set(lengths) and FULL.other_length() not in lengths
    for case in cases:
        assert LengthCase.from_row({"case": case.to_json()}) == case


def test_a_batch_is_lognormal():
    drawn = FULL.batch_lengths()
    assert len(drawn) == 32 and max(drawn) <= 512 and min(drawn) >= 4
    assert 60 < sum(drawn) / 32 < 130
    assert sorted(FULL.batch_lengths(1)) == sorted(drawn) != FULL.batch_lengths(1)


def test_every_case_is_measured_with_every_system_that_knows_it(tmp_path):
    jobs = gpu_lengths.make_plan(options(tmp_path))
    pairs = [(case, system) for cases, system in jobs for case in cases]
    assert len(set(pairs)) == len(pairs)
    assert {system for case, system in pairs if case == PADDED} == set(ALL)
    assert {system for case, system in pairs if case == SHORT} == {"stof", "compile-dynamic", "compile-buckets"}
    assert len([case for case, system in pairs if system == "stof-fixed" and case.kind == LENGTH]) == 3 * 4
    assert {case for case, system in pairs if system == "stof-fixed"} >= {LONGEST}
    lazy = gpu_lengths.make_plan(options(tmp_path, "--mode", "lazy"))
    assert max(len(cases) for cases, system in lazy if system == "stof") == gpu_lengths.LAZY_CHUNK


def test_ranges_come_first_and_some_lengths_may_be_taken(tmp_path):
    jobs = gpu_lengths.make_plan(options(tmp_path, "--lengths", "7", "--only", "length", "batch"))
    assert [system for _, system in jobs[:9]] == ["stof", "compile-dynamic"] * 3 + ["compile-buckets"] * 3
    assert {len(cases) for cases, _ in jobs[:9]} == {7} and jobs[0][0] == jobs[1][0] == jobs[6][0]
    assert [case.length for case in jobs[0][0]] == FULL.lengths()[:7]
    assert [system for cases, system in jobs[9:14] if cases == (PADDED,)] == [*RANGE, "stof-fixed", "compile-fixed"]
    assert all(cases[0].length in FULL.lengths()[:7] for cases, system in jobs[14:])


def test_rows_are_printed_and_written_one_by_one(tmp_path, monkeypatch, length_row, capsys):
    """So that what was measured is there if the process is killed while it measures."""
    some = options(tmp_path, "--only", SHORT.label, LONG.label, "--systems", "stof")
    fields = {name: length_row(SHORT, "stof", 300.0)[name] for name in ("median_us", "wall_us", "error", "half_error")}

    class Killed(FakeWorker):
        def measure(self, _deadline, add_part):
            add_part({"case": SHORT, "first_us": 1.0, **fields})
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

        def close(self):
            closed.append(self)

    closed: list = []
    monkeypatch.setattr(gpu_lengths, "start_worker", lambda cases, system, _: Killed(cases, system, [], {}))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        gpu_lengths.run(some)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [row["case"]["length"] for row in json.loads(some.out.read_text())] == [SHORT.length]
    assert SHORT.label in capsys.readouterr().out and len(closed) == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["rows.json"]


@pytest.mark.parametrize("length, bucket", [(8, 8), (9, 16), (128, 128), (129, 256), (4096, 4096)])
def test_a_bucket_is_the_next_power_of_two(length, bucket):
    assert bucket_of(length, 8) == bucket
    assert bucket_of(length, 1024) == max(1024, bucket)


@pytest.mark.parametrize("case", [LengthCase(LENGTH, "BERT-base", 1, 11), LengthCase(LENGTH, "GPT-2", 1, 11),
                                  LengthCase(BATCH, "BERT-base", 3, 10)], ids=lambda case: case.label)  # fmt: skip
def test_padding_changes_no_result(case):
    with torch.no_grad():
        call = prepare("compile-buckets", case, TINY, "ahead", "cpu", small=True)[0].call
        half, exact = make_model(case, True), make_model(case, True).float()
        inputs = make_inputs(case, 2, "cpu", TINY)[1]
        error, half_error = _errors(call(*inputs), half, exact, inputs)
    assert call(*inputs).shape[1] == case.length
    assert 0 < error <= 2 * half_error < 0.1


def test_unmasked_padding_is_wrong():
    """Padded tokens that an encoder sees change results by more than the rule of errors allows."""
    case = LengthCase(BATCH, "BERT-base", 3, 10)
    with torch.no_grad():
        half, exact = make_model(case, True), make_model(case, True).float()
        inputs = make_inputs(case, 1, "cpu", TINY)[0]
        error, half_error = _errors(half(inputs[0]), half, exact, inputs)
    assert error > 2 * half_error


def test_a_process_may_measure_several_rows():
    parts = []
    messages = [("ready", None), ("part", {"case": 1}), ("part", {"case": 2}), ("row", {"prepare_s": 1.0})]
    assert worker(FakeConnection(*messages)).measure(time.monotonic(), parts.append) == {"prepare_s": 1.0}
    assert parts == [{"case": 1}, {"case": 2}]
    late = worker(FakeConnection(*messages[:2])).measure(time.monotonic(), parts.append)
    assert late == {"failed": NOT_MEASURED} and parts[2:] == [{"case": 1}]


class FakeWorker:
    """A process that measures what the test says."""

    def __init__(self, cases, system, parts, row):
        self.case, self.system, self.parts, self.row = cases, system, parts, row

    def is_ready(self, _deadline):
        return True

    def measure(self, _deadline, add_part):
        for part in self.parts:
            add_part(part)
        return self.row

    def close(self):
        pass


@pytest.mark.parametrize("cause, written, status", [("no memory", 3, 0), (NOT_MEASURED, 1, 1)])
def test_what_a_deadline_cuts_off_is_left_and_what_fails_is_a_row(
    tmp_path, monkeypatch, length_row, cause, written, status
):
    some = options(tmp_path, "--only", *(c.label for c in (SHORT, LONG, LONGEST)), "--systems", "stof")
    fields = {name: length_row(SHORT, "stof", 300.0)[name] for name in ("median_us", "wall_us", "error", "half_error")}
    fields |= {"first_us": 1.0}
    start = lambda cases, system, _: FakeWorker(cases, system, [{"case": SHORT, **fields}], {"failed": cause})
    monkeypatch.setattr(gpu_lengths, "start_worker", start)
    assert gpu_lengths.run(some) == status
    rows = json.loads(some.out.read_text())
    assert len(rows) == written and sum("failed" in row for row in rows) == written - 1
    assert gpu_lengths.make_plan(some) == [((LONG, LONGEST), "stof")]  # failed rows are measured again


@pytest.mark.slow
def test_a_dry_run_writes_rows(tmp_path):
    only = "--dry-run", "--only", "length GPT-2 1x8", "--workers", "2", "--mode", "lazy"
    some = options(tmp_path, *only, "--systems", "stof,compile-dynamic")
    assert gpu_lengths.run(some) == 0
    rows = json.loads(some.out.read_text())
    assert [(row["system"], row["case"]["length"]) for row in rows] == [("stof", 8), ("compile-dynamic", 8)]
    assert all(row["error"] <= 2 * row["half_error"] < 0.1 and row["first_us"] > 0 for row in rows)
    assert "lazy" in rows[0]["variant"] and rows[0]["build_s"] >= 0
    assert gpu_lengths.make_plan(some) == []


@pytest.mark.slow
def test_a_batch_is_measured():
    case = LengthCase(BATCH, "BERT-base", 3, 10)
    with torch.no_grad():
        _, measure = get_ready((case,), "stof-fixed", "ahead", "cpu", True, TINY)
        (row,) = measure()
    assert row["case"] == case and row["error"] <= 2 * row["half_error"] < 0.1


def test_buckets_are_given_to_the_range_of_lengths(tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(stof_tvm, "build", lambda *args, **kwargs: given.append(kwargs))
    for case in (LengthCase(LENGTH, "GPT-2", 1, 8), LengthCase(BATCH, "BERT-base", 3, 10)):
        variant = prepare("stof", case, TINY, "ahead", "cpu", True, (16, 24))[0].variant
        assert ("buckets 16, 24" in variant) == ("buckets" in given[-1]) == (case.kind == LENGTH)
    prepare("stof-fixed", LengthCase(LENGTH, "GPT-2", 1, 8), TINY, "ahead", "cpu", True, (16, 24))
    assert given[-1].keys() == {"verify"}
    assert options(tmp_path, "--buckets", "512,4096").buckets == (512, 4096)
    with pytest.raises(SystemExit):
        options(tmp_path, "--buckets", "512", "--mode", "lazy")
    assert "--buckets are for --mode ahead" in capsys.readouterr().err


def test_requirements_are_ratios_of_the_rows(length_row):
    rows = [
        length_row(SHORT, "stof", 100.0), length_row(SHORT, "compile-dynamic", 120.0),
        length_row(SHORT, "stof-fixed", 95.0), length_row(SHORT, "compile-buckets", 400.0),
        length_row(LONG, "stof", 100.0, first_us=600.0), length_row(LONG, "compile-dynamic", 300.0),
        length_row(LONG, "compile-buckets", failed="no memory"),
        length_row(PADDED, "stof", 100.0), length_row(PADDED, "compile-fixed", 300.0),
        length_row(PADDED, "compile-dynamic", 20.0, error=1.0), length_row(PADDED, "stof-fixed", 150.0),
        length_row(LONGEST, "stof", 100.0, peak_mb=1000), length_row(LONGEST, "stof-fixed", 100.0, peak_mb=800),
    ]  # fmt: skip
    results = ModelResults(rows, LengthCase)
    device, latency, fixed, first, batch, padded, memory = lines(results)
    assert device.mean == pytest.approx((1.2 * 3) ** 0.5) and device.verdict == "pass"
    assert latency.ratios == {SHORT: 3.0} and latency.missing == [LONG] and latency.verdict == "incomplete"
    assert fixed.ratios == {SHORT: 0.95} and fixed.verdict == "pass"
    assert first_ratio(results, "BERT-base") == 4.0 and first.verdict == "miss"
    assert batch.ratios == {PADDED: 3.0} and padded.verdict == "miss"
    assert memory.ratios == {LONGEST: 0.8} and memory.verdict == "miss"
    text = page(results)
    assert "| BERT-base | 1 × 293 | 100 | 95 (0.95) | 120 (1.20) | 400 (4.00) |" in text
    assert "- compile-buckets, 1 cases (length BERT-base 1x4082): no memory" in text
    assert "- compile-dynamic at batch BERT-base 32x267: error 1.00e+00" in text
    assert "| 1000 | 800 |" in text
    assert "BERT-base: the 99th percentile of first calls is 4.00" in summary(results)
    assert line(results, LONG).split()[3:6] == ["stof", "100.0", "(150)"]


def test_a_wrong_result_of_ours_is_a_miss(length_row):
    rows = [length_row(SHORT, "stof", 1.0, error=1.0), length_row(SHORT, "compile-dynamic", 120.0)]
    assert lines(ModelResults(rows, LengthCase))[0].verdict == "miss"


def test_merged_rows_make_a_page(tmp_path, length_row):
    (tmp_path / "a.json").write_text(json.dumps([length_row(SHORT, "stof", 200.0)]))
    assert gpu_lengths.merge("lengths", LengthCase, page, [tmp_path / "a.json"], tmp_path) == 0
    (row,) = json.loads((tmp_path / "nvidia-h200/lengths.json").read_text())
    assert row["median_us"] == 200.0
    assert (tmp_path / "nvidia-h200/lengths.md").read_text().startswith("# Lengths")
