"""The benchmark of masks found at run time: a dry run, its checks and its table."""

import json

import pytest
import torch

from benchmarks import gpu_runtime_masks as bench
from benchmarks.peers.accuracy import Reference

ROW = {
    "bench": "runtime_masks", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc", "run": "1",
    "case": {"rule": "vertical_slash", "length": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
    "system": "stof", "median_us": 900.0, "samples_us": [900.0], "rule_us": 500.0, "plan_us": 11.0, "density": 0.4,
    "recall": 0.99, "error": 1e-3, "half_error": 2e-3,
}  # fmt: skip


@pytest.mark.slow
def test_dry_run(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.json"
    arguments = ["gpu_runtime_masks.py", "--dry-run", "--out", str(rows), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", arguments)
    assert bench.main() == 0
    found = json.loads(rows.read_text())
    assert {row["system"] for row in found} == {"stof", "stof-causal", "cudnn-causal"}
    assert all(bench.is_right(row) and row["median_us"] > 0 for row in found)
    assert "0 failed or wrong" in capsys.readouterr().out


def test_a_wrong_output_is_not_timed(monkeypatch):
    case = bench.Case("top_blocks", 256, 2, 2, 32)
    assert "median_us" in bench.times(case, "stof", "cpu")
    monkeypatch.setattr(bench, "systems", lambda: {"stof": lambda case, rule, block_map, q, k, v: lambda: q * 0})
    row = bench.times(case, "stof", "cpu")
    assert row["median_us"] is None and not bench.is_right(row)


def test_sampled_places_are_those_of_the_reference():
    q = torch.randn(2, 4, 300, 8)
    rows, b, h = Reference.places(q)
    reference = Reference(q, q, q, lambda rows: torch.ones(len(rows), 300, dtype=torch.bool))
    assert torch.equal(rows, reference.rows) and torch.equal(b, reference.b) and torch.equal(h, reference.h)


def test_a_failure_is_a_row_and_the_newest_row_counts(tmp_path):
    peer = ROW | {"system": "fa4-causal", "median_us": 1000.0}
    failed = ROW | {"system": "cudnn-causal", "failed": "ImportError: none"}
    (tmp_path / "rows.json").write_text(json.dumps([ROW, ROW | {"date": "2026-11-24", "median_us": 5.0}, peer, failed]))
    assert bench.merge([tmp_path / "rows.json"], tmp_path / "results") == 0
    text = (tmp_path / "results" / "nvidia-h200" / "runtime_masks.md").read_text()
    assert "| 500 | 11.0 | 900 | fa4-causal 1000 (1.11) |" in text and "failed, ImportError" in text
