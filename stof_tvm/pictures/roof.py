"""Rooflines: the rate of kernels' useful arithmetic over their arithmetic intensity, below the limits of a device."""

from collections.abc import Mapping, Sequence

import numpy as np

from stof_tvm.pictures.style import INK, MARKERS, PALETTE, caption, drawing
from tir_kernels.errors import InputError


def roofline(series: Mapping[str, Sequence[tuple[float, float]]], bandwidth: float, peak: float, measured: str = ""):
    """A matplotlib Figure of kernels as points below the limits of memory and matrix products, both axes logarithmic.

    Parameters
    ----------
    series : dict of name to points
        Points are (FLOP a byte, FLOP a second): useful arithmetic divided by the bytes that must be moved at least,
        and by the time.  Up to six series.
    bandwidth : float
        The memory's bandwidth, bytes a second.
    peak : float
        The peak rate of matrix products, FLOP a second.
    measured : str
        The caption: GPU and date.

    Raises
    ------
    InputError
        There are more series than colours, or a point, a bandwidth or a peak is not above 0.
    UnsupportedError
        There is no matplotlib.
    """
    numbers = [bandwidth, peak, *(x for points in series.values() for point in points for x in point)]
    if len(series) > len(PALETTE):
        raise InputError(f"a roofline has colours for {len(PALETTE)} series, got {len(series)}")
    if not all(number > 0 for number in numbers):
        raise InputError(f"a roofline has logarithmic axes, so that all numbers must be above 0, got {min(numbers)}")
    intensities = [point[0] for points in series.values() for point in points] + [peak / bandwidth]
    low, high = min(intensities) / 1.5, max(intensities) * 1.5
    with drawing() as plt:
        figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
        at = np.geomspace(low, high, 200)
        ax.plot(at, np.minimum(peak, bandwidth * at) / 1e12, color=INK, linewidth=1.5)
        ax.text(high, peak / 1e12 * 1.08, f"products, {peak / 1e12:.0f} TFLOP/s", ha="right", va="bottom")
        slope = np.degrees(np.arctan(bandwidth / 1e12))
        along = {"rotation": slope, "transform_rotates_text": True, "rotation_mode": "anchor", "va": "bottom"}
        ax.text(1.15 * low, bandwidth * 1.25 * low / 1e12, f"memory, {bandwidth / 1e12:.1f} TB/s", **along)
        for (name, points), colour, marker in zip(series.items(), PALETTE, MARKERS):
            x, y = np.array(points).T
            ax.plot(x, y / 1e12, marker, color=colour, label=name, markersize=4.5, alpha=0.85, markeredgewidth=0)
        ax.set(xscale="log", yscale="log", xlabel="useful FLOP for each byte that must be moved")
        ax.set(ylabel="useful TFLOP/s", xlim=(low, high), ylim=(None, peak / 1e12 * 2))
        ax.grid(True)
        ax.legend(loc="lower right")
        caption(figure, measured)
    return figure
