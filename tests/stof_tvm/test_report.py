"""The report as data and as tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stof_tvm.report import Report, Verification
from tests.stof_tvm.rows import ROW
from tir_kernels.report_rows import AttentionShape, SegmentRow, SiteRow

# What an engine of format 6 has: one attention on a kernel, one that stays dense, and the comparison with PyTorch.
SAVED = Path(__file__).parent / "saving/report_of_format_6.json"
SITE = SiteRow(site="layer.0", spelling="sdpa", reason="a symbolic shape")


def rewritten(kernel, density, block_density):
    return replace(ROW, kernel=kernel, density=density, block_density=block_density, block=(64, 64))


def segment(number, kernel="gemm", predicted_us=3.25):
    return SegmentRow(number, ("matmul", "add"), kernel, "64x64", "covered", predicted_us)


REPORT = Report("llvm", (SITE,), (segment(0), segment(1, "default", None), segment(2)), "0x4f", ("log sm_80; skipped",))


def test_data_round_trips():
    compared = replace(REPORT, verification=Verification("passed", "as PyTorch", 1e-6, 0.5), notes=("no cache",))
    for report in (REPORT, compared, replace(REPORT, sites=(SITE, ROW)), replace(REPORT, float32="tf32")):
        assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_saved_report_is_read_and_written_as_it_was():
    saved = json.loads(SAVED.read_text())
    report = Report.from_dict(saved)
    assert report.to_dict() == {**saved, "float32": "ieee"}  # which reports did not say at first
    (row,), (dense,) = report.rewritten, report.not_rewritten
    assert row.shape == AttentionShape(1, 2, 2, 32, 32, 16, "float32") and row.block == (32, 32)
    assert row.notes == ("no static mask: nothing to skip", "bias or padding given at run time")
    assert (dense.site, dense.density, dense.notes) == ("#1", 1.0, ()) and "head_dim=640" in dense.reason
    assert report.verification.result == "passed" and report.verification.error < 1e-4
    assert [len(row.operators) for row in report.segments] == [1, 19]


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("sites", "rewritten", 1),
        ("sites", "reason", None),
        ("sites", "notes", ["x", 1]),
        ("sites", "density", "all"),
        ("sites", "block", [32]),
        ("sites", "block", ["32", "32"]),
        ("sites", "shape", {"batch": 1}),
        ("sites", "layouts", "bhsd"),
        ("segments", "operators", [1]),
        ("segments", "predicted_us", "2"),
        ("verification", "error", "none"),
    ],
)
def test_a_malformed_field_is_named(part, field, value):
    saved = json.loads(SAVED.read_text())
    row = saved[part] if part == "verification" else saved[part][0]
    row[field] = value
    with pytest.raises(ValueError, match="'batch'|'heads'" if field == "shape" else field):
        Report.from_dict(saved)
    del row[field]
    if field not in ("notes", "density"):
        with pytest.raises(ValueError, match=field):
            Report.from_dict(saved)


def test_equal_segments_share_a_row():
    lines = str(REPORT).splitlines()
    start = lines.index("fusion: 6 operators in 3 segments, scheme 0x4f")
    rows = [line.split("  ") for line in lines[start + 2 : start + 4]]
    assert [row[1].strip() for row in rows] == ["0 (×2)", "1"]
    assert "gemm" in lines[start + 2] and "3.2" in lines[start + 2]
    assert "TVM" in lines[start + 3] and "3.2" not in lines[start + 3]


def test_dense_sites_are_told():
    assert "layer.0 [sdpa]: a symbolic shape" in str(REPORT)


def test_a_tuning_log_is_told_last():
    assert str(REPORT).endswith("tuning:\n  log sm_80; skipped")
    assert "tuning:" not in str(replace(REPORT, tuning=()))
    measured = replace(REPORT, segments=(replace(segment(0), measured_us=2.75),))
    assert "3.2           2.8" in str(measured)


@pytest.mark.parametrize(
    "kernel, density, block_density, told",
    [
        ("block-wise", 0.5, 0.6, "1 of 1 sites on sparse kernels"),
        ("block-wise", 0.5, 1.0, "1 of 1 sites on attention kernels, 0 with something to skip"),
        ("row-wise", 0.5, 1.0, "1 of 1 sites on sparse kernels"),
        ("row-wise", 1.0, 1.0, "1 of 1 sites on attention kernels, 0 with something to skip"),
    ],
)
def test_sparse_is_what_skips_something(kernel, density, block_density, told):
    """A block-wise kernel computes every block of its list, whatever single elements the mask drops of it."""
    row = replace(ROW, kernel=kernel, density=density, block_density=block_density)
    report = Report("llvm", (row,), (), "0x0")
    assert f"attention: {told}" in str(report).splitlines()


@pytest.mark.parametrize(
    "kernel, density, block_density, why",
    [
        (
            "block-wise",
            0.125,
            1.0,
            "every block of 64×64 keeps something, and only a block that keeps nothing is skipped",
        ),
        ("block-wise", 1.0, 1.0, "the mask keeps everything"),
        ("block-wise", 0.5, 0.6, None),
        ("row-wise", 0.5, 1.0, None),
    ],
)
def test_a_report_says_why_nothing_is_skipped(kernel, density, block_density, why):
    sites = (rewritten(kernel, density, block_density), rewritten("block-wise", 0.1, 0.2))
    lines = [line for line in str(Report("llvm", sites, (), "0x0")).splitlines() if "nothing is skipped" in line]
    assert len(lines) == (why is not None)
    assert why is None or lines[0].startswith(f"nothing is skipped at 1 of 2 sites: {why}")
    assert density == 1 or why is None or lines[0].endswith("(the mask keeps 12.5% of the elements)")


def test_what_a_rule_finds_is_less_than_the_report_knows():
    """The densities of its row are those of the static mask within which it finds blocks."""
    for mask, told in (("none", "top_blocks(2)"), ("causal()", "top_blocks(2) within causal()")):
        row = replace(ROW, mask=mask, density=0.5, block_density=1.0, rule="top_blocks(2)")
        (line,) = (x for x in str(Report("llvm", (row,), (), "0x0")).splitlines() if "top_blocks" in x)
        assert "≤ 50.0%" in line and "≤ 100.0%" in line and f"  {told}  " in line


def test_an_attention_without_a_mask_has_none_that_keeps_everything():
    row = replace(ROW, kernel="block-wise", density=1.0, block_density=1.0, mask="none")
    (line,) = (x for x in str(Report("llvm", (row,), (), "0x0")).splitlines() if "nothing is skipped" in x)
    assert line == "nothing is skipped at 1 of 1 sites: there is no mask"


def test_a_model_without_attention():
    assert "attention: none was recognised" in str(Report("llvm", (), (), "0x0")).splitlines()
