"""Pictures of masks show what is kept."""

import sys

import numpy as np
import pytest

from stof_tvm import masks
from stof_tvm.masks import plotting
from tir_kernels.errors import UnsupportedError


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedError, match=r"plotting needs matplotlib \(pip install 'stof-tvm\[viz\]'\)"):
        masks.causal().plot(64)


@pytest.fixture
def no_display():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    matplotlib.use("Agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def test_short_masks_are_drawn_element_by_element(no_display):
    axes = masks.padding([5, 30]).plot(20, 30, batch=1)
    assert axes.images[0].get_array().shape == (20, 30)
    assert np.asarray(axes.images[0].get_array()).all()
    assert "padding((5, 30))\n100.0 % kept" == axes.get_title()


def test_long_masks_are_drawn_by_the_share_of_each_block(no_display, monkeypatch):
    monkeypatch.setattr(plotting, "PIXELS", 32)
    mask = masks.causal()
    picture = np.asarray(mask.plot(200, 96).images[0].get_array())
    dense = mask.dense(200, 96).numpy()
    expected = [[dense[i : i + 8, j : j + 8].mean() for j in range(0, 96, 8)] for i in range(0, 200, 8)]
    np.testing.assert_allclose(picture, expected)
