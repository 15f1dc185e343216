"""The report as data and as tables."""

from dataclasses import replace

import pytest

from stof_tvm.report import Report

SITE = {"site": "layer.0", "spelling": "sdpa", "rewritten": False, "reason": "a symbolic shape"}


def segment(number, kernel="gemm", predicted_us=3.25):
    return {
        "segment": number,
        "operators": ["matmul", "add"],
        "kernel": kernel,
        "config": "64x64",
        "predicted_us": predicted_us,
        "measured_us": None,
        "reason": "covered",
    }


REPORT = Report("llvm", (SITE,), (segment(0), segment(1, "default", None), segment(2)), "0x4f", ("log sm_80; skipped",))


def test_data_round_trips():
    assert Report.from_dict(REPORT.to_dict()) == REPORT


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
    measured = replace(REPORT, segments=({**segment(0), "measured_us": 2.75},))
    assert "3.2           2.8" in str(measured)


def rewritten(kernel, density, block_density):
    return {
        **SITE,
        "rewritten": True,
        "kernel": kernel,
        "config": "64x64",
        "block": [64, 64],
        "mask": "causal()",
        "mask_digest": "0",
        "density": density,
        "block_density": block_density,
        "shape": {},
        "layouts": [],
        "predicted_us": None,
        "measured_us": None,
        "notes": [],
    }


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
    report = Report("llvm", (rewritten(kernel, density, block_density),), (), "0x0")
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


def test_a_model_without_attention():
    assert "attention: none was recognised" in str(Report("llvm", (), (), "0x0")).splitlines()
