"""The benchmark of models that GPUs divide: its cases, what rows say, the reference, a dry run of two processes."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_parallel as bench
from benchmarks.parallel.cases import CASES
from benchmarks.parallel.model import inputs_of, model_of, widely
from benchmarks.parallel.results import line, merge

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_parallel.py"
ROW = {
    "bench": "parallel", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc", "run": "1",
    "case": asdict(CASES[0]), "system": "stof", "ranks": 2, "prepare_s": 60.0, "gpus": 2, "notes": [], "error": 1e-3,
    "half_error": 1e-3, "predicted": {"us": 22000.0, "advice": "take both"}, "median_us": 25000.0,
    "samples_us": [25000.0],
}  # fmt: skip
ALONE = ROW | {"system": "stof-1", "gpus": 1, "median_us": 40000.0, "predicted": {"us": 41800.0, "advice": "one"}}
DTENSOR = {key: ROW[key] for key in ROW if key != "predicted"} | {"system": "compile-dtensor", "median_us": 35000.0}


def test_cases_have_the_sizes_that_are_asked_for():
    every = bench.cases(bench.parse_arguments([]))
    assert [case.call for case in every] == [
        "1 × 2048 tokens", "8 × 2048 tokens", "a token, cache of 2048", "8 × 2048 tokens",
    ]  # fmt: skip
    some = bench.cases(bench.parse_arguments(["--only", "decode", "bert", "--layers", "8"]))
    assert [case.layers for case in some] == [8, 24]
    assert all(case.dim == 64 for case in bench.cases(bench.parse_arguments(["--dry-run"])))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_the_model_in_a_wider_dtype(case):
    case = case.tiny
    model, inputs = model_of(case, "cpu"), inputs_of(case, "cpu")
    weights = {name: x.clone() for name, x in model.named_parameters()}
    with torch.no_grad():
        found, narrow = widely(model, inputs, case), model(*inputs)
        expected = model.double()(*inputs)
    assert found.dtype == torch.float64 and 0 < (narrow - found).abs().max() < 1e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # angles are float32 in both
    assert all(torch.equal(x.float(), weights[name]) for name, x in model.named_parameters())


def test_lines_say_what_is_wrong():
    assert "25000 µs on 2" in line(ROW)
    assert "WRONG" in line(ROW | {"error": 3e-3}) and "WRONG" in line(ROW | {"error": float("nan")})
    assert "failed, late" in line(ROW | {"failed": "late"})


def test_merging_keeps_the_newest_row_and_writes_ratios(tmp_path):
    older = ROW | {"date": "2026-11-24", "median_us": 90000.0}
    broken = ROW | {"case": asdict(CASES[3]), "failed": "no memory"}
    (tmp_path / "rows.json").write_text(json.dumps([ROW, ALONE, DTENSOR, older, broken]))
    assert merge([tmp_path / "rows.json"], tmp_path / "results") == 0
    folder = tmp_path / "results" / "nvidia-h200"
    assert len(json.loads((folder / "parallel.json").read_text())) == 4
    page = (folder / "parallel.md").read_text()
    assert (
        "| llama-like, 32 layers 4096 wide | 1 × 2048 tokens | 2 | 40000 | 25000 | 1.60× | 1.90× | 35000 | 1.40× |"
        in page
    )
    assert "| bert-like, 24 layers 1024 wide | 8 × 2048 tokens | 2 | – | – | – | – | – | – |" in page
    assert "on 2: 22000 µs predicted, 25000 µs measured (-12%)" in page and "`stof plan` of 1x2048: take both." in page
    assert "failed, no memory" in page and "NVIDIA H200, driver 580, 2026-11-25, commit abc." in page


@pytest.mark.slow
def test_a_dry_run_of_two_processes(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    # 3 key heads do not divide the 4 of the LLaMA-like model: its processes fail, and the others go on.
    options = ["--dry-run", "--no-verify", "--only", "1x2048", "bert", "--systems", "stof", "--kv-heads", "3"]
    files = ["--out", str(tmp_path / "rows.json"), "--worker-log", str(tmp_path / "log")]
    done = subprocess.run(
        [*launch, *options, *files, "--together", "2", "--prepare-s", "90", "--deadline-s", "120"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 rows, 1 failed or wrong" in done.stdout
    bad, good = json.loads((tmp_path / "rows.json").read_text())
    assert "heads in key and value must divide" in bad["failed"]
    assert set(good) == set(ROW) and good["error"] <= 2 * good["half_error"] and len(good["samples_us"]) == 7
