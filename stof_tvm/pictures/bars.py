"""Latencies of systems beside each other: a panel for each case, each with an axis of its own that begins at 0."""

from collections.abc import Mapping

from stof_tvm.pictures.style import PALETTE, caption, drawing
from tir_kernels.errors import InputError

COLUMNS = 3  # most panels in a row
PANEL = (3.1, 0.26)  # inches: a panel's width, a bar's height


def latency_bars(cases: Mapping[str, Mapping[str, float]], measured: str = ""):
    """A matplotlib Figure with a panel for each case and a bar for each system that was timed in it.

    Parameters
    ----------
    cases : dict of title to dict of system to microseconds
        Every panel shows its systems in the order in which they first appear in `cases`, each always in one colour.
    measured : str
        The caption: GPU and date.

    Raises
    ------
    InputError
        A case has no system, or there are more systems than colours (six).
    UnsupportedError
        There is no matplotlib.
    """
    systems = list(dict.fromkeys(system for times in cases.values() for system in times))
    if not cases or not all(cases.values()) or len(systems) > len(PALETTE):
        raise InputError(f"latency bars need cases with 1 to {len(PALETTE)} systems, got {len(systems)}: {systems}")
    colours = dict(zip(systems, PALETTE))
    with drawing() as plt:
        columns = min(len(cases), COLUMNS)
        rows = -(-len(cases) // columns)
        size = PANEL[0] * columns, (PANEL[1] * len(systems) + 0.75) * rows
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for ax in axes.flat[len(cases) :]:
            ax.set_visible(False)
        for ax, (title, times) in zip(axes.flat, cases.items()):
            present = [system for system in systems if system in times]
            bars = ax.barh(present, [times[s] for s in present], color=[colours[s] for s in present], height=0.7)
            ax.bar_label(bars, [_microseconds(times[s]) for s in present], padding=3, fontsize=8)
            ax.set(title=title, xlabel="µs", xlim=(0, 1.25 * max(times.values())), ylim=(len(systems) - 0.4, -0.6))
            ax.tick_params(axis="y", length=0)
            ax.locator_params(axis="x", nbins=4)
        caption(figure, measured)
    return figure


def _microseconds(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"
