"""The blocks of a mask as kernels see them: empty ones are skipped, full ones unmasked, partial ones have bitmaps."""

import textwrap

import numpy as np

from stof_tvm.masks.compilation import check_lengths
from stof_tvm.pictures.style import BLUE, VERMILION, drawing
from tir_kernels.errors import InputError
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART

PIXELS = 1024  # longer masks are drawn without their elements
MAX_BLOCKS = 2048  # along a side; a mask of more is drawn in larger blocks
MAX_PANELS = 16
COLUMNS = 4  # most panels in a row
PANEL = 3.2  # inches
DROPPED = PART + FULL  # a fourth state: elements that a partial block does not keep
KEYS = {FULL: "full", PART: "part"}
KEYS_OF_ELEMENTS = {FULL: "full", PART: "part: kept", DROPPED: "part: dropped"}


def block_mask(
    mask,
    q_len: int,
    kv_len: int | None = None,
    block=(64, 64),
    batch: int = 0,
    head: int | None = None,
    name: str | None = None,
):
    """A matplotlib Figure of the blocks of a mask: full ones blue, partial ones orange, empty ones left out.

    Up to 1024 queries and keys, the elements that a partial block drops are pale; where a side has more than 2048
    blocks, larger blocks are drawn.  A mask with patterns per head has a panel for each, up to 16.

    Parameters
    ----------
    mask : Mask
        What to draw.
    q_len, kv_len : int
        Number of queries and keys; kv_len defaults to q_len.
    block : (int, int)
        Height and width of the blocks, multiples of 8.
    batch : int
        The batch entry that is drawn.
    head : int, optional
        Draw this head only.
    name : str, optional
        What the mask is called above the picture; default: how it prints itself.

    Raises
    ------
    MaskError
        The mask does not fit the lengths.
    InputError
        The mask has no such batch entry or head.
    UnsupportedError
        There is no matplotlib.
    """
    q_len, kv_len = check_lengths(q_len, kv_len)
    check_entry(mask, batch, head)
    heads = [head] if head is not None else range(min(mask.heads or 1, MAX_PANELS))
    with drawing() as plt:
        columns = min(len(heads), COLUMNS)
        rows = -(-len(heads) // columns)
        size = (PANEL * columns + 0.6, (PANEL + 0.4) * rows + 0.8)  # the layout wants room for titles
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        for ax in axes.flat[len(heads) :]:
            ax.set_visible(False)
        for ax, h in zip(axes.flat, heads):
            draw(ax, mask.at(batch, h), q_len, kv_len, block)
            if mask.heads:
                ax.set_title(f"head {h}: {ax.get_title()}")
        title = textwrap.shorten(name or repr(mask), 60 * columns, placeholder=" …")
        if head is None and (mask.heads or 1) > MAX_PANELS:
            title += f"\nheads 0 … {MAX_PANELS - 1} of {mask.heads}"
        figure.suptitle(title, fontsize=10)
        handles = legend_keys(KEYS_OF_ELEMENTS if max(q_len, kv_len) <= PIXELS else KEYS)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def draw_entry(mask, q_len: int, kv_len: int | None, batch: int, head: int, ax, block):
    """Draw one batch entry and head into `ax` (default: a new figure) and return the Axes; see `Mask.plot`."""
    q_len, kv_len = check_lengths(q_len, kv_len)
    check_entry(mask, batch, head)
    with drawing() as plt:
        ax = plt.subplots()[1] if ax is None else ax
        draw(ax, mask.at(batch, head), q_len, kv_len, block)
        ax.set_title(f"{textwrap.shorten(repr(mask), 60, placeholder=' …')}\n{ax.get_title()}")
    return ax


def check_entry(mask, batch: int, head: int | None) -> None:
    """InputError unless the mask has this batch entry and head."""
    for name, number, count in (("batch", batch, mask.batch or 1), ("head", head or 0, mask.heads or 1)):
        if not 0 <= number < count:
            raise InputError(f"{name} {number} is not in 0…{count - 1}, what the mask has")


def draw(ax, entry, q_len: int, kv_len: int, block=(64, 64)) -> None:
    """Draw a mask that depends on neither batch nor head into matplotlib Axes; the title counts its blocks."""
    stored = entry.compile(q_len, kv_len, block)
    while max(stored.n_block_rows, stored.n_block_cols) > MAX_BLOCKS:
        stored = entry.compile(q_len, kv_len, (2 * stored.block_m, 2 * stored.block_n))
    states = block_states(stored)
    height, width = stored.block_m, stored.block_n
    ax.imshow(
        _colours()[_elements(entry, states, stored) if max(q_len, kv_len) <= PIXELS else states],
        extent=(0, states.shape[1] * width, states.shape[0] * height, 0),
        interpolation_stage="rgba",
        aspect="equal",
    )
    full, part = (np.count_nonzero(states == state) for state in (FULL, PART))
    ax.set(xlim=(0, kv_len), ylim=(q_len, 0), xlabel="key", ylabel="query")
    ax.locator_params(nbins=5)
    ax.set_title(
        f"{stored.density:.1%} kept\n{full} full, {part} part of {states.size} blocks of {height}×{width}",
    )


def block_states(stored) -> np.ndarray:
    """int8 (n_block_rows, n_block_cols): EMPTY, PART or FULL for each block of a BlockSparseMask's first pattern."""
    states = np.full((stored.n_block_rows, stored.n_block_cols), EMPTY)
    rows = np.arange(stored.n_block_rows)
    for state, row_ptr, columns in (
        (FULL, stored.full_row_ptr, stored.full_col_idx),
        (PART, stored.part_row_ptr, stored.part_col_idx),
    ):
        states[np.repeat(rows, np.diff(row_ptr)), columns] = state
    return states


def legend_keys(keys: dict) -> list:
    """Patches that say what the colours of these states mean."""
    from matplotlib.patches import Patch

    colours = _colours() / 255
    return [Patch(facecolor=colours[state], label=label) for state, label in keys.items()]


def _elements(entry, states, stored) -> np.ndarray:
    """int8 (q_len, kv_len): the state of each element's block, DROPPED where a partial block does not keep it."""
    q_len, kv_len = stored.q_len, stored.kv_len
    spread = states.repeat(stored.block_m, axis=0).repeat(stored.block_n, axis=1)[:q_len, :kv_len]
    picture = np.full((states.shape[0] * stored.block_m, states.shape[1] * stored.block_n), EMPTY)
    picture[:q_len, :kv_len] = np.where((spread == PART) & ~entry.dense(q_len, kv_len).numpy(), DROPPED, spread)
    return picture


def _colours() -> np.ndarray:
    """uint8 (4, 4): red, green, blue and opacity of each state."""
    from matplotlib.colors import to_rgba

    shades = {EMPTY: (BLUE, 0.0), PART: (VERMILION, 1.0), FULL: (BLUE, 1.0), DROPPED: (VERMILION, 0.3)}
    return np.array([[255 * x for x in to_rgba(*shades[state])] for state in sorted(shades)], np.uint8)
