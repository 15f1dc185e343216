"""Pictures are readable on light and dark pages, and equal ones are equal files."""

import sys

import numpy as np
import pytest

from stof_tvm import masks, pictures
from stof_tvm.pictures import style
from tir_kernels.errors import InputError, UnsupportedError

LIGHT, DARK = "#ffffff", "#0d1117"
# Sight as linear RGB seen from linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
SIGHT = {
    "all cones": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}
# OKLab (Ottosson 2020): from linear RGB to cones, and from their cube roots to lightness and two hues.
CONES = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
LAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def contrast(a, b):
    """WCAG's contrast ratio."""
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x))) for x in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_all_colours_stand_out_from_the_ground(ground):
    assert min(contrast(colour, ground) for colour in style.PALETTE) >= 3
    assert contrast(style.INK, ground) >= 4


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_stay_apart_for_the_colour_blind(sight):
    seen = np.clip(np.array([linear(colour) for colour in style.PALETTE]) @ np.transpose(SIGHT[sight]), 0, 1)
    lab = np.cbrt(seen @ np.transpose(CONES)) @ np.transpose(LAB)
    distances = [np.linalg.norm(a - b) for i, a in enumerate(lab) for b in lab[:i]]
    assert min(distances) > 0.12  # 0.02 is about the least that can be told apart


@pytest.mark.parametrize("suffix", style.SUFFIXES)
def test_equal_pictures_are_equal_files_without_a_ground(suffix, tmp_path):
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        pictures.save(pictures.latency_bars({"case": {"stof": 1.0}}), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == ".png":
        import matplotlib.image

        corner = matplotlib.image.imread(files[0])[0, 0]
        assert corner[3] == 0


def test_what_cannot_be_written(tmp_path):
    figure = pictures.latency_bars({"case": {"stof": 1.0}})
    with pytest.raises(InputError, match="ends in .png or .svg, got mask.pdf"):
        pictures.save(figure, tmp_path / "mask.pdf")
    with pytest.raises(InputError, match="cannot be written"):
        pictures.save(figure, tmp_path / "no_such_folder" / "mask.png")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedError, match=r"plotting needs matplotlib \(pip install 'stof-tvm\[viz\]'\)"):
        masks.causal().plot(64)
