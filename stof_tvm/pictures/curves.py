"""The progress of a search: best latency by trial and by second."""

from collections.abc import Mapping, Sequence

from stof_tvm.pictures.style import PALETTE, caption, drawing
from tir_kernels.errors import InputError


def tuning_curves(searches: Mapping[str, Sequence[tuple[int, float, float]]], measured: str = ""):
    """A matplotlib Figure of searches: the best latency so far by trial and by second.

    Parameters
    ----------
    searches : dict of name to points
        Points are (trial, seconds, best µs so far), as `TuningReport.curve()` has them.  One search is drawn in
        microseconds, several in multiples of each one's last point.
    measured : str
        The caption: GPU and date.

    Raises
    ------
    InputError
        A search has no point, or there are more than six.
    UnsupportedError
        There is no matplotlib.
    """
    if len(searches) > len(PALETTE):
        raise InputError(f"there are colours for {len(PALETTE)} searches, got {len(searches)}")
    for name, points in searches.items():
        if not len(points):
            raise InputError(f"nothing was measured in the search {name!r}")
    with drawing() as plt:
        figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
        for (name, points), colour in zip(searches.items(), PALETTE):
            unit = points[-1][2] if len(searches) > 1 else 1.0
            for axis, ax in enumerate(axes):
                at, best = [point[axis] for point in points], [point[2] / unit for point in points]
                ax.step(at, best, where="post", color=colour, label=name, linewidth=1.8)
                ax.plot(at[-1:], best[-1:], "o", color=colour, clip_on=False)
        latency = "best latency, µs" if len(searches) == 1 else "latency / best latency found"
        axes[0].set(xlabel="trials", ylabel=latency)
        axes[1].set(xlabel="seconds since the search began")
        for ax in axes:
            ax.set_xlim(left=0)
            ax.grid(True)
        axes[1].legend(loc="upper left")
        caption(figure, measured)
    return figure
