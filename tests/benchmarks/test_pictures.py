"""The committed results have pictures that show what is in them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")

from benchmarks import pictures  # noqa: E402
from benchmarks.peers.results import BANDWIDTH, MATRIX_RATE, Results, read_rows  # noqa: E402

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawn():
    import matplotlib.pyplot as plt

    yield pictures.figures(RESULTS)
    plt.close("all")


def test_every_picture_is_committed_as_of_the_committed_rows(drawn):
    """Where this fails, results have changed: run `python benchmarks/pictures.py`."""
    assert {file.stem for file in PICTURES.iterdir()} == set(drawn)
    for file in PICTURES.iterdir():
        described = "".join(re.findall(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.S))
        assert described == "\n".join(text.get_text() for text in drawn[file.stem].texts)


def test_all_axes_are_labelled_and_all_measurements_dated(drawn):
    for name, figure in drawn.items():
        for ax in figure.axes:
            assert not ax.get_visible() or ax.get_xlabel()
        if not name.startswith("mask"):
            assert any("NVIDIA H200" in text.get_text() and "2026-" in text.get_text() for text in figure.texts)


def test_bars_are_the_rows(drawn):
    rows = read_rows([RESULTS / "attention.json"])
    (ax,) = [ax for ax in drawn["attention_latency"].axes if "longformer" in ax.get_title()]
    shape = {"mask": "longformer", "batch": 8, "heads": 12, "q_len": 4096, "head_dim": 64}
    times = {r["system"]: r.get("median_us") for r in rows if shape.items() <= r["case"].items()}
    flex = min(us for system, us in times.items() if system.startswith("flex") and us is not None)
    assert [bar.get_width() for bar in ax.patches] == [times["stof"], flex, times["sdpa-mask"]]


def test_no_kernel_is_above_the_roof():
    # A decoding case's operands may stay in the L2 cache: a little above is possible.
    points = pictures.attention_points(Results(read_rows([RESULTS / "attention.json", RESULTS / "decode.json"])))
    shares = [rate / min(MATRIX_RATE, BANDWIDTH * x) for series in points.values() for x, rate in series]
    assert len(shares) > 200 and 0.5 < max(shares) < 1.15
