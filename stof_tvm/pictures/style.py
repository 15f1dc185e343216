"""The style of all pictures: no background, ink of middle lightness, colours that the colour-blind can tell apart."""

import contextlib
from pathlib import Path

from stof_tvm.saving.whole_file import replacing
from tir_kernels.errors import InputError, UnsupportedError

# Each colour has a contrast of at least 3 to white and to GitHub's dark background, #0d1117.  The last four were
# searched for so that people without red or green cones can tell all colours apart.
INK = "#7a7a7a"
BLUE, VERMILION = "#0072b2", "#d55e00"
PALETTE = (BLUE, VERMILION, "#779999", "#aa3366", "#7788ff", "#3344ff")
MARKERS = "osD^vP"
SUFFIXES = (".png", ".svg")
DOTS_PER_INCH = 150

_SETTINGS = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "svg.hashsalt": "stof",  # equal pictures are equal files
}


@contextlib.contextmanager
def drawing():
    """matplotlib.pyplot, with these settings inside of the block.  UnsupportedError without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError(f"plotting needs matplotlib (pip install 'stof-tvm[viz]'): {error}") from None
    with plt.rc_context(_SETTINGS):
        yield plt


def save(figure, path: str | Path) -> None:
    """Write a figure to `path`, a .png (150 dots an inch) or .svg, transparent; equal pictures are equal files.

    The file's metadata have the caption as "Description".
    Raises InputError for another suffix, or where the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"a picture ends in {' or '.join(SUFFIXES)}, got {path.name}")
    metadata: dict[str, str | None] = {"Description": "\n".join(text.get_text() for text in figure.texts)}
    metadata |= {".png": {"Software": None}, ".svg": {"Date": None}}[path.suffix]  # else files of equal pictures differ
    with drawing():
        try:
            with replacing(path) as unfinished:
                figure.savefig(unfinished, dpi=DOTS_PER_INCH, bbox_inches="tight", metadata=metadata)
        except OSError as error:
            raise InputError(f"the picture cannot be written: {error}") from None


def caption(figure, text: str) -> None:
    """A line below everything: what was measured where and when."""
    if text:
        figure.text(0.5, -0.02, text, ha="center", va="top", fontsize=8)
