"""The report as data and as tables."""

from dataclasses import replace

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
    assert "default" in lines[start + 3] and "3.2" not in lines[start + 3]


def test_dense_sites_are_told():
    assert "layer.0 [sdpa]: a symbolic shape" in str(REPORT)


def test_a_tuning_log_is_told_last():
    assert str(REPORT).endswith("tuning:\n  log sm_80; skipped")
    assert "tuning:" not in str(replace(REPORT, tuning=()))
    measured = replace(REPORT, segments=({**segment(0), "measured_us": 2.75},))
    assert "3.2           2.8" in str(measured)
