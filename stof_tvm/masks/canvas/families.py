"""Masks of images and videos that papers propose: sliding tiles, neighbourhoods and radial bands."""

import math
import reprlib

import numpy as np

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.canvas.bands import Bands
from stof_tvm.masks.canvas.boxes import Box, Interval
from stof_tvm.masks.canvas.layout import Layout, check_axes, check_canvas, check_text
from stof_tvm.masks.mask import Leaf, Mask
from stof_tvm.masks.pattern import Columns, Or
from tir_kernels.errors import MaskError

ORDERS = ("tiles", "row-major")


def sliding_tile(canvas, tile, window, text: int = 0, order: str = "tiles", text_first: bool = False) -> Mask:
    """Keeps the tiles of a window around the query's tile (Sliding Tile Attention, Zhang et al., 2025).

    All queries of a tile keep the same keys, so that blocks are full or empty wherever they lie in one tile.

    Parameters
    ----------
    canvas : tuple of int
        Sizes of the canvas in tokens, (T, H, W) or (H, W).
    tile : int or tuple of int
        Sizes of a tile in tokens.  Tiles at the far ends are shorter where they do not divide the canvas.
    window : int or tuple of int
        Sizes of the window in tokens, multiples of the tile's, as the paper has it: (18, 24, 24) with tiles of
        (6, 8, 8) is 3 × 3 × 3 tiles.  It is centred at the query's tile, an even number having one more before it, and
        is moved inwards at the ends, so that every query keeps as many tiles.  A window that is at least as long as
        the canvas, whatever the tile, is the whole axis.
    text : int
        Number of tokens besides those of the canvas, which attend to everything and are attended by everything.
    order : str
        "tiles": tokens stand tile by tile, as `tile_order` puts them.  "row-major": as models have them.  The mask is
        the same; its blocks are then scattered.
    text_first : bool
        Whether the text comes before the canvas instead of behind it.

    Raises
    ------
    MaskError
        Sizes that are no positive integers or do not fit one another; lengths that are not those of canvas and text.
    """
    canvas = check_canvas(canvas)
    tile, window = check_axes("tile", tile, canvas), check_axes("window", window, canvas)
    if order not in ORDERS:
        raise MaskError(f"order={reprlib.repr(order)} must be 'tiles' or 'row-major'")
    for axis, (size, step, reach) in enumerate(zip(canvas, tile, window, strict=True)):
        if reach % step and reach < size:
            raise MaskError(
                f"window[{axis}]={reach} must be a multiple of tile[{axis}]={step}, or at least canvas[{axis}]={size}"
            )
    texts = check_text(text, text_first)
    layout = Layout(canvas, tile if order == "tiles" else None, **texts)

    def bind(q_len, kv_len):
        layout.check_lengths("sliding_tile", q_len, kv_len)
        places = zip(layout.coordinates(), canvas, tile, window, strict=True)
        return layout.joined(
            Box([_tiles(place // step, -(-size // step), -(-reach // step)) for place, size, step, reach in places])
        )

    arguments = {"canvas": canvas, "tile": tile, "window": window, "text": texts["text"], "order": order}
    return Leaf(sliding_tile, {**arguments, "text_first": texts["text_first"]}, bind)


def _tiles(place: np.ndarray, count: int, window: int) -> Interval:
    window = min(window, count)
    low = np.clip(np.arange(count) - window // 2, 0, count - window)
    return Interval(place, low, low + window - 1)


def neighborhood(canvas, window, dilation=1, causal=False, tile=None, text: int = 0, text_first: bool = False) -> Mask:
    """Keeps the box of keys around each query (Neighborhood Attention, Hassani et al., 2023), as NATTEN defines it.

    Parameters
    ----------
    canvas : tuple of int
        Sizes of the canvas in tokens, (H, W) or (T, H, W), row-major.
    window : int or tuple of int
        How many keys each query keeps on each axis.  It is centred, an even number having one more key before the
        query, and is moved inwards at the ends, so that every query keeps as many.
    dilation : int or tuple of int
        The distance of the keys; window × dilation is at most the canvas.
    causal : bool or tuple of bool
        On these axes, the window ends at the query, and is cut at the beginning instead of being moved.
    tile : int or tuple of int, optional
        If given, tokens stand tile by tile, as `tile_order` puts them, which makes more blocks full or empty.
    text : int
        Number of tokens besides those of the canvas, which attend to everything and are attended by everything.
    text_first : bool
        Whether the text comes before the canvas instead of behind it.

    Raises
    ------
    MaskError
        Sizes that are no positive integers or do not fit one another; lengths that are not those of canvas and text.
    """
    canvas = check_canvas(canvas)
    window, dilation = check_axes("window", window, canvas), check_axes("dilation", dilation, canvas)
    causal = _flags("causal", causal, canvas)
    for axis, (size, keys, step) in enumerate(zip(canvas, window, dilation, strict=True)):
        if keys * step > size:
            raise MaskError(
                f"window[{axis}]={keys} with dilation[{axis}]={step} covers {keys * step} tokens, must be at most "
                f"canvas[{axis}]={size}"
            )
    tile = None if tile is None else check_axes("tile", tile, canvas)
    texts = check_text(text, text_first)
    layout = Layout(canvas, tile, **texts)

    def bind(q_len, kv_len):
        layout.check_lengths("neighborhood", q_len, kv_len)
        axes = zip(layout.coordinates(), canvas, window, dilation, causal, strict=True)
        return layout.joined(Box([_neighbors(*axis) for axis in axes]))

    arguments = {
        "canvas": canvas,
        "window": window,
        "dilation": dilation if any(step > 1 for step in dilation) else 1,
        "causal": causal if any(causal) else False,
        "tile": tile,
    }
    return Leaf(neighborhood, {**arguments, **texts}, bind)


def _neighbors(place: np.ndarray, size: int, window: int, dilation: int, causal: bool) -> Interval:
    """Windows on one axis.  Coordinates of one residue are a group, in which windows are not dilated."""
    at = np.arange(size)
    residue, index = at % dilation, at // dilation
    if causal:
        first, last = np.maximum(index - window + 1, 0), index
    else:
        first = np.clip(index - window // 2, 0, -(-(size - residue) // dilation) - window)
        last = first + window - 1
    return Interval(place, first * dilation + residue, last * dilation + residue, dilation)


def _flags(name: str, values, canvas: tuple[int, ...]) -> tuple[bool, ...]:
    values = tuple(values) if isinstance(values, tuple | list) else (values,) * len(canvas)
    if len(values) != len(canvas) or not all(isinstance(value, bool | np.bool_) for value in values):
        raise MaskError(
            f"{name}={reprlib.repr(values)} must be True or False, or one of them for each axis of {canvas}"
        )
    return tuple(map(bool, values))


def radial(canvas, decay: float = 1.0, least: int = 1, sink: int = 1, text: int = 0, text_first: bool = False) -> Mask:
    """Keeps bands that get narrower with the distance in time (Radial Attention, Li et al., 2025).

    A query at place k of frame i keeps the key at place l of frame j, places being row-major in a frame of s tokens and
    d = |i - j|, where

        |k - l| + 1 <= max(w, least)   and   d is a multiple of max(1, ceil(least / w)),
        w = decay × s / 2^floor(log2(max(d, 1))).

    So the band halves whenever the distance doubles, and once it would be narrower than `least`, some distances are
    left out instead.  With `decay=1` and `least=1` this is the paper's formula.

    Parameters
    ----------
    canvas : tuple of int
        Sizes of the canvas in tokens, (T, H, W) or (T, s): frames first, row-major.
    decay : float
        Width of the band at distances 0 and 1, in frames: 1 keeps all of them.
    least : int
        The narrowest band in tokens; a multiple of the kernels' block saves partial blocks.
    sink : int
        Number of frames at the beginning that every query keeps.
    text : int
        Number of tokens besides those of the canvas, which attend to everything and are attended by everything.
    text_first : bool
        Whether the text comes before the canvas instead of behind it.

    Raises
    ------
    MaskError
        Sizes that are no positive integers, a decay that is no positive number; lengths that are not those of canvas
        and text.
    """
    canvas = check_canvas(canvas, least=2)
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < math.inf:
        raise MaskError(f"decay={reprlib.repr(decay)} must be a positive number")
    least, sink = check_int("least", least, least=1), check_int("sink", sink)
    texts = check_text(text, text_first)
    frames, size = canvas[0], math.prod(canvas[1:])
    layout = Layout((frames, size), **texts)

    def bind(q_len, kv_len):
        layout.check_lengths("radial", q_len, kv_len)
        distance = np.arange(frames)
        halvings = np.array([max(int(d), 1).bit_length() - 1 for d in distance])
        width = decay * size / 2.0**halvings
        # No band is wider than a frame, and no period matters that exceeds all distances.
        bound = np.floor(np.minimum(np.maximum(width, least), size)).astype(np.int64) - 1
        period = np.ceil(np.maximum(least / np.maximum(width, least / frames), 1)).astype(np.int64)
        reach = np.where(distance % period == 0, bound, -1)
        bands = Bands(layout, reach, bound)
        number = np.arange(q_len) - (texts["text"] if texts["text_first"] else 0)
        return layout.joined(Or(bands, Columns((number >= 0) & (number < min(sink, frames) * size))))

    arguments = {"canvas": canvas, "decay": float(decay), "least": least, "sink": sink}
    return Leaf(radial, {**arguments, **texts}, bind)
