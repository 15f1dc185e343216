"""matplotlib without a window."""

import pytest


@pytest.fixture(autouse=True)
def no_display():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    matplotlib.use("Agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")
