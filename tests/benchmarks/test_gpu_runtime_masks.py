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
PEER = {name: value for name, value in ROW.items() if name not in ("rule_us", "plan_us", "density", "recall")}


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


def test_peers_of_rules():
    top_blocks, slashes, antidiagonals = bench.CASES[:3]
    peers = {case.rule: {s for s in bench.SYSTEMS if bench.applies(s, case)} for case in bench.CASES[:3]}
    dense = {"stof", "stof-causal", "cudnn-causal", "fa4-causal"}
    assert peers["top_blocks"] == {"stof", "cudnn-bsa", "fastvideo"}
    assert peers["vertical_slash"] == dense | {"minference"} and peers["xattention"] == dense


def test_the_map_given_is_the_same_attention():
    case = bench.Case("vertical_slash", 512, 4, 2, 32)
    q, k, v = bench.inputs(case, "cpu")
    rule = case.stof_rule()
    found = rule.block_map(q, k)
    given = bench.given_map(case, rule, found, q, k, v)
    assert torch.equal(given(), bench.stof(case, rule, found, q, k, v)())
    row = bench.times(case, "stof", "cpu")
    assert bench.is_right(row) and row["given_us"] > 0 and row["recall"] > 0.9
    assert "given the map" in bench.line(ROW | row)


def test_fastvideo_is_given_the_map(fastvideo):
    row = bench.times(bench.Case("top_blocks", 64 * 70, 2, 2, 64), "fastvideo", "cpu")
    assert bench.is_right(row) and row["median_us"] > 0


def test_a_call_whose_graph_misses_a_kernel_is_an_error(monkeypatch):
    q = torch.randn(1, 2, 128, 32).bfloat16()
    reference = Reference(q, q, q, lambda rows: torch.ones(len(rows), 128, dtype=torch.bool))
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q)

    class Graph:
        kept = [exact * float("nan")]

        def __init__(self, calls, device):
            pass

        def warm_up(self):
            pass

        def samples(self):
            return [1.0]

    monkeypatch.setattr(bench, "Replays", Graph)
    assert bench.checked_median(lambda: exact, reference, "cpu")["median_us"] == 1
    with pytest.raises(RuntimeError, match="a kernel is not in it"):
        bench.checked_median(lambda: exact, reference, "cuda")


def test_sampled_places_are_those_of_the_reference():
    q = torch.randn(2, 4, 300, 8)
    rows, b, h = Reference.places(q)
    reference = Reference(q, q, q, lambda rows: torch.ones(len(rows), 300, dtype=torch.bool))
    assert torch.equal(rows, reference.rows) and torch.equal(b, reference.b) and torch.equal(h, reference.h)


def test_a_failure_is_a_row_and_the_newest_row_counts(tmp_path):
    peer = PEER | {"system": "fa4-causal", "median_us": 1000.0}
    failed = ROW | {"system": "cudnn-causal", "failed": "ImportError: none"}
    (tmp_path / "rows.json").write_text(json.dumps([ROW, ROW | {"date": "2026-11-24", "median_us": 5.0}, peer, failed]))
    assert bench.merge([tmp_path / "rows.json"], tmp_path / "results") == 0
    text = (tmp_path / "results" / "nvidia-h200" / "runtime_masks.md").read_text()
    assert "| 500 | 11.0 | – | 900 | fa4-causal 1000 (1.11) |" in text and "failed, ImportError" in text


def test_peers_that_are_given_lists_are_compared_with_the_map_given():
    lists = PEER | {"system": "cudnn-bsa", "median_us": 300.0}
    own = PEER | {"system": "minference", "median_us": 1800.0, "recall": 0.98}
    text = bench.page([ROW | {"given_us": 400.0}, lists, own])
    assert "| 400 | 900 | cudnn-bsa 300 (0.75 given the map), minference 1800 (2.00, recall 0.980) |" in text
    assert "cudnn-bsa 300 (0.33)" in bench.page([ROW, lists])
