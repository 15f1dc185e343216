"""Where the tokens of a canvas stand: its axes, their order in the sequence, and text beside them."""

import math
import reprlib
from dataclasses import dataclass

import numpy as np

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.pattern import Columns, Or, Pattern, Rows
from tir_kernels.errors import MaskError

MOST_AXES = 3


def check_canvas(canvas, least: int = 1) -> tuple[int, ...]:
    """The sizes of a canvas as a tuple; MaskError unless it has `least` … 3 positive axes."""
    if not isinstance(canvas, tuple | list) or not least <= len(canvas) <= MOST_AXES:
        raise MaskError(
            f"canvas={reprlib.repr(canvas)} must be a tuple of {least} to {MOST_AXES} sizes, such as (T, H, W)"
        )
    return tuple(check_int(f"canvas[{k}]", size, least=1) for k, size in enumerate(canvas))


def check_axes(name: str, values, canvas: tuple[int, ...], least: int = 1) -> tuple[int, ...]:
    """An integer for each axis of the canvas, or one for all of them, as a tuple; else MaskError."""
    if not isinstance(values, tuple | list):
        values = (values,) * len(canvas)
    if len(values) != len(canvas):
        raise MaskError(f"{name}={reprlib.repr(values)} has {len(values)} axes, must have those of canvas={canvas}")
    return tuple(check_int(f"{name}[{k}]", value, least) for k, value in enumerate(values))


@dataclass(frozen=True)
class Layout:
    """The sequence of a canvas: row-major or tile by tile, with `text` tokens behind it or before it.

    Attributes
    ----------
    canvas : tuple of int
        Sizes of the axes, the slowest first.
    tile : tuple of int or None
        If given, tokens stand tile by tile.  Tiles at the far ends of the axes are shorter where the tile does not
        divide the canvas; larger tiles come first, and those of one size in row-major order, as the tokens in each.
    text : int
        Number of tokens that are not on the canvas.
    text_first : bool
        Whether they come before the canvas.
    """

    canvas: tuple[int, ...]
    tile: tuple[int, ...] | None = None
    text: int = 0
    text_first: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens on the canvas."""
        return math.prod(self.canvas)

    def check_lengths(self, family: str, q_len: int, kv_len: int) -> None:
        """MaskError unless both lengths are those of the canvas and the text."""
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if length != self.tokens + self.text:
                text = f" and text={self.text}" if self.text else ""
                raise MaskError(
                    f"{family}: canvas={self.canvas}{text} is {self.tokens + self.text} tokens, must be {name}={length}"
                )

    def order(self) -> np.ndarray:
        """int64 (tokens,): the row-major number of each token on the canvas, in the order of the sequence."""
        if self.tile is None:
            return np.arange(self.tokens)
        # Tokens of a tile keep their row-major order, so a stable sort by tiles is all there is to do.  A short tile
        # among the others would move all that follow it off the blocks of kernels, which then share two tiles.
        counts = [-(-size // tile) for size, tile in zip(self.canvas, self.tile, strict=True)]
        steps = [np.arange(size) // tile for size, tile in zip(self.canvas, self.tile, strict=True)]
        number = np.ravel_multi_index(np.meshgrid(*steps, indexing="ij"), counts).reshape(-1)
        return np.lexsort((number, -np.bincount(number)[number]))

    def coordinates(self) -> list[np.ndarray]:
        """int64 (tokens + text,) for each axis: where each token of the sequence lies.

        Text has the place of the token of the canvas that is next to it, so that blocks keep narrow bounds.
        """
        return [self.beside_text(c) for c in np.unravel_index(self.order(), self.canvas)]

    def beside_text(self, values: np.ndarray) -> np.ndarray:
        """(tokens + text,): values of the canvas's tokens, the nearest of them for text."""
        return np.pad(values, (self.text, 0) if self.text_first else (0, self.text), mode="edge")

    def joined(self, pattern: Pattern) -> Pattern:
        """A pattern of the canvas, with text that attends to everything and is attended by everything."""
        if not self.text:
            return pattern
        number = np.arange(self.tokens + self.text)
        is_text = number < self.text if self.text_first else number >= self.tokens
        return Or(pattern, Or(Rows(is_text), Columns(is_text)))


def check_text(text, text_first) -> dict:
    """The arguments `text` and `text_first` by name; MaskError for no count of tokens."""
    return {"text": check_int("text", text), "text_first": bool(text_first)}
