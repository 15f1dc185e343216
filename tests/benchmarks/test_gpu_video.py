"""The benchmark of video transformers: a dry run, its checks and its table."""

import json

import pytest
import torch

from benchmarks import gpu_video as bench
from benchmarks.video import attention, report
from benchmarks.video.cases import CASES, FASTVIDEO_BLOCKS, FASTVIDEO_STA, TINY, Case, on_canvas
from benchmarks.video.fastvideo import PaddedTiles, has_kernel
from stof_tvm import masks

ROW = {
    "bench": "video", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-25", "commit": "abc", "run": "1",
    "case": json.loads(json.dumps(CASES[0].__dict__)), "system": "stof", "median_us": 25000.0, "density": 0.09,
    "scheduled": 0.09, "peak_bytes": 105, "touched_bytes": 100, "error": 1e-3, "half_error": 2e-3,
}  # fmt: skip


def _dry_run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["gpu_video.py", "--dry-run", "--commit", "abc", *arguments])
    return bench.main()


def test_dry_run_of_attentions(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.json"
    assert (
        _dry_run(
            monkeypatch,
            "--out",
            str(rows),
            "--only",
            "tiles",
            "million",
            "--systems",
            "stof,stof-blocks-256,stof-static,flex",
            "--log",
            str(tmp_path / "l"),
        )
        == 0
    )
    found = json.loads(rows.read_text())
    assert [row["system"] for row in found] == ["stof", "flex"] * 2 + ["stof", "stof-blocks-256", "stof-static"]
    assert all(bench.is_right(row) and row["median_us"] > 0 for row in found)
    assert "0 failed or wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_dry_run_of_a_layer(tmp_path, monkeypatch):
    pytest.importorskip("diffusers")
    rows = tmp_path / "rows.json"
    assert _dry_run(monkeypatch, "--out", str(rows), "--only", "block", "--log", str(tmp_path / "l")) == 0
    assert [row["system"] for row in json.loads(rows.read_text())] == ["stof", "compile-flex"]


@pytest.mark.slow
def test_a_layer_under_another_mask_is_wrong():
    pytest.importorskip("diffusers")
    from benchmarks.video import wan

    case = TINY[2]
    other = Case(**case.__dict__ | {"window": (3, 4, 6)})
    with torch.no_grad():
        given = wan.make_inputs(case, 1, "cpu", True, 0)
        call, _ = wan._compiled(other, other.tiles("cpu"), "cpu", True)
        row = wan._measure(call, case, case.tiles("cpu"), given, "cpu", True)
    assert row["median_us"] is None and not report.is_right(row)


def test_a_wrong_output_is_not_timed(monkeypatch):
    case = TINY[1]
    rows = case.tiles("cpu").rows
    monkeypatch.setattr(attention, "_stof", lambda case, system, q, k, v: (lambda: q * 0, rows, {}))
    _, measured = attention.get_ready(case, "stof", "cpu")
    row = measured()
    assert row["median_us"] is None and not report.is_right(row)


@pytest.mark.parametrize("case", TINY[:3], ids=lambda case: case.name)
def test_the_formula_is_the_mask(case):
    tiles = case.tiles("cpu")
    dense = torch.cat(list(tiles.chunks()))
    assert torch.equal(dense, masks.sliding_tile(case.canvas, case.tile, case.window).dense(case.length))
    assert tiles.kept == int(dense.sum())


def test_the_plan_has_the_cases_that_fastvideo_has_kernels_for():
    options = bench.parse_arguments(["--systems", f"stof,{FASTVIDEO_STA},{FASTVIDEO_BLOCKS}", "--only", "tiles"])
    assert {(case.name, system) for case, system in bench.plan(options) if system != "stof"} == {
        ("HunyuanVideo", FASTVIDEO_STA), ("HunyuanVideo", FASTVIDEO_BLOCKS), ("Wan-14B-720p", FASTVIDEO_BLOCKS)
    }  # fmt: skip
    assert not [system for case in TINY[:2] for system in (FASTVIDEO_STA, FASTVIDEO_BLOCKS) if has_kernel(case, system)]


@pytest.mark.parametrize("case", [*CASES[:2], *TINY[:2]], ids=lambda case: f"{case.name} {case.length}")
def test_padded_tiles_hold_each_token_once_and_what_the_mask_keeps(case):
    tiles = case.tiles("cpu")
    padded = PaddedTiles(tiles)
    place, sizes = padded.place, padded.sizes.long()
    assert len(place.unique()) == len(place) == case.length and int(place.max()) < padded.length == 64 * len(sizes)
    assert int(sizes.sum()) == case.length and 1 <= int(sizes.min()) <= int(sizes.max()) <= 64
    # The kernel takes the first tokens of a block for those that are there.
    assert bool((place % 64 < sizes[place // 64]).all())
    assert case.name != "HunyuanVideo" or case in TINY or padded.length == case.length
    # Tokens of a block are of one tile, so that what two tokens keep is what their blocks do.
    block_tile = torch.empty(len(sizes), dtype=torch.int32)
    block_tile[place // 64] = tiles.number
    assert torch.equal(block_tile[place // 64], tiles.number)
    assert torch.equal(padded.listed, tiles.near[block_tile[:, None], block_tile])
    assert int(sizes @ padded.listed.long() @ sizes) == tiles.kept
    rows = torch.arange(0, case.length, max(1, case.length // 50))
    assert torch.equal(padded.listed[place[rows, None] // 64, place // 64], tiles.rows(rows))


def test_short_tiles_are_padded_to_blocks_and_no_further():
    case = CASES[1]
    padded = PaddedTiles(case.tiles("cpu"))
    # Tokens of 3 full and one short layer of tiles, 5 full and one short row, 10 columns of tiles.
    tokens = [t * h * 8 for t in (6, 6, 6, 3) for h in (8, 8, 8, 8, 8, 5) for _ in range(10)]
    assert sum(tokens) == case.length and len(padded.sizes) == sum(-(-n // 64) for n in tokens)


@pytest.mark.parametrize("system", [FASTVIDEO_STA, FASTVIDEO_BLOCKS])
def test_fastvideo_is_given_the_mask(system, fastvideo, monkeypatch):
    small = on_canvas("tiles", "small", 2, (5, 12, 20), (1, 2, 2), (3, 6, 6), 64)
    case = small if system == FASTVIDEO_STA else on_canvas("tiles", "small", 2, (5, 9, 12), (2, 4, 6), (4, 4, 6), 64)
    _, measured = attention.get_ready(case, system, "cpu")
    row = measured() | {"case": case.__dict__}
    assert report.is_right(row) and row["median_us"] > 0


def test_a_failure_is_a_row_and_the_newest_row_counts(tmp_path):
    peer = ROW | {"system": "flex", "median_us": 50000.0}
    failed = ROW | {"system": "cudnn-flex", "failed": "ImportError: none"}
    (tmp_path / "rows.json").write_text(json.dumps([ROW, ROW | {"date": "2026-11-24", "median_us": 5.0}, peer, failed]))
    assert bench.merge([tmp_path / "rows.json"], tmp_path / "results") == 0
    text = (tmp_path / "results" / "nvidia-h200" / "video.md").read_text()
    useful = 4 * 128 * 24 * 115200**2 * 0.09 / 25000e-6
    assert f"| 25000 | {useful / 1e12:.0f} | {useful / 989e12:.1%} |" in text
    assert "| 2.00 |" in text and "failed, ImportError" in text and Case.from_row(ROW) == CASES[0]
