"""The benchmark of sequences that GPUs share: its cases, what rows say, a dry run of two processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu_context_parallel as bench

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_context_parallel.py"
CASE = {"mask": "window", "length": 131072, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
ROW = {
    "bench": "context_parallel", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc",
    "run": "1", "case": CASE,
    "gpus": 2, "median_us": 7000.0, "samples_us": [7000.0], "one_gpu_us": 13000.0, "efficiency": 0.929,
    "tflops_a_gpu": 500.0, "received_bytes": 17 << 20, "least_bytes": 17 << 20, "imbalance": 0.01, "way": "equal runs",
    "plan_s": 0.4, "predicted": {"one_gpu_us": 13040.0, "us": 6810.0}, "error": 1e-3, "one_gpu_error": 1e-3,
    "half_error": 2e-3,
}  # fmt: skip


def test_cases():
    every = bench.cases(bench.parse_arguments([]))
    assert {case.label for case in every} >= {"window 131072", "documents 1048576", "bigbird 131072"} and len(
        every
    ) == 6
    assert [case.parts for case in every] == [1, 1, 1, 4, 4, 4]
    assert all(case.length * case.q_heads // case.parts * case.head_dim < 2**31 for case in every)
    assert len(bench.cases(bench.parse_arguments(["--only", "documents"]))) == 2


@pytest.mark.parametrize("length", [1024, 131072, 1048576])
def test_documents_fill_the_length(length):
    lengths = bench.document_lengths(length)
    assert sum(lengths) == length and min(lengths) > 0 and max(lengths) <= min(length, 131072) // 4


@pytest.mark.parametrize("mask", bench.MASKS)
def test_kept_rows_are_the_masks(mask):
    case = bench.Case(mask, bench.TINY, 4, 2, 16)
    rows = torch.tensor([0, 5, 511, 1023])
    assert torch.equal(bench.kept_rows(case.stof_mask(), 1024, rows), case.stof_mask().dense(1024)[rows])


def test_a_row_is_right_within_twice_the_error_of_half_precision():
    assert bench.is_right(ROW)
    for name in ("error", "one_gpu_error"):
        assert not bench.is_right(ROW | {name: 5e-3}) and not bench.is_right(ROW | {name: float("nan")})
    assert "WRONG" in bench.line(ROW | {"error": 1.0}) and "efficiency 0.929" in bench.line(ROW)


def test_merging_keeps_the_newest_row_of_a_case(tmp_path):
    older = ROW | {"date": "2026-11-24", "median_us": 9000.0}
    (tmp_path / "rows.json").write_text(json.dumps([ROW, older]))
    assert bench.merge([tmp_path / "rows.json"], tmp_path / "results") == 0
    folder = tmp_path / "results" / "nvidia-h200"
    assert json.loads((folder / "context_parallel.json").read_text()) == [ROW]
    page = (folder / "context_parallel.md").read_text()
    assert "| window | 131,072 | 2 | 13000 | 7000 | 0.929 | 500 | 17.0 | 17.0 | 6810 | yes |" in page
    assert "NVIDIA H200, driver 580, 2026-11-25, commit abc." in page


@pytest.mark.slow
def test_a_dry_run_of_two_processes(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*launch, "--dry-run", "--only", "window", "--out", str(tmp_path / "rows.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert set(row) == set(ROW) and bench.is_right(row)
    tags = row["received_bytes"] - row["least_bytes"]  # on CPUs a rank's keys come with the call's, in a row
    assert row["least_bytes"] > 0 and 0 <= tags <= 256 and np.isfinite(row["efficiency"])
