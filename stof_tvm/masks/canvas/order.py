"""Orders of a canvas's tokens, and masks seen through them."""

import functools
import reprlib
from typing import NamedTuple

import numpy as np
import torch

from stof_tvm.masks import pattern
from stof_tvm.masks.arguments import as_numpy
from stof_tvm.masks.canvas.boxes import Box
from stof_tvm.masks.canvas.layout import Layout, check_axes, check_canvas, check_text
from stof_tvm.masks.canvas.words import extremes
from stof_tvm.masks.compilation import LONGEST
from stof_tvm.masks.identity import Identity
from stof_tvm.masks.mask import Mask
from tir_kernels.errors import MaskError


class TileOrder(NamedTuple):
    """Two int64 tensors (tokens,): `x[:, order]` are row-major tokens tile by tile, `y[:, inverse]` row-major again."""

    order: torch.Tensor
    inverse: torch.Tensor


def tile_order(canvas, tile, text: int = 0, text_first: bool = False) -> TileOrder:
    """The order of tokens in which `sliding_tile` has them, as indices of row-major tokens, and its inverse.

    Tiles of `tile` sizes are in row-major order on the `canvas`, and so are the tokens of each.  Those at the far ends
    of the axes are shorter where `tile` does not divide `canvas`, and come after larger ones, which so begin where
    blocks of kernels do.  `text` tokens stay behind the canvas, or before it with `text_first`.  Raises MaskError for
    sizes that are no positive integers, and for more tokens than a mask takes.
    """
    canvas = check_canvas(canvas)
    layout = Layout(canvas, check_axes("tile", tile, canvas), **check_text(text, text_first))
    if layout.tokens + layout.text > LONGEST:
        raise MaskError(f"canvas={canvas} and text={layout.text} are more tokens than {LONGEST}, the most there may be")
    before, behind = (layout.text, 0) if layout.text_first else (0, layout.text)
    middle = layout.order() + before
    order = np.concatenate([np.arange(before), middle, np.arange(behind) + layout.tokens])
    return TileOrder(torch.from_numpy(order), torch.from_numpy(np.argsort(order)))


def reordered(mask: Mask, order) -> Mask:
    """The mask of tokens in another order: it keeps (i, j) where `mask` keeps (order[i], order[j]).

    So attention over x[:, order] with `reordered(mask, order)` is attention over x with `mask`, in that order.  `order`
    is a permutation of 0 … length - 1, a tensor, array or sequence of integers.  Masks of boxes (`neighborhood`,
    `sliding_tile`) compile as fast in any order; others are looked at element by element where bounds do not decide.
    Raises MaskError for something else than a Mask and for no permutation, and at lengths that are not its length.
    """
    if not isinstance(mask, Mask):
        raise MaskError(f"reordered takes a Mask, got {type(mask).__name__}")
    return Reordered(mask, _permutation(order))


def _permutation(order) -> np.ndarray:
    if isinstance(order, TileOrder):
        raise MaskError("order is a TileOrder, which has two: pass its .order or its .inverse")
    array = as_numpy("order", order)
    length = len(array) if array.ndim == 1 else 0
    if not length or array.dtype.kind not in "iu" or not np.array_equal(np.sort(array), np.arange(length)):
        raise MaskError(f"order={reprlib.repr(order)} must be a permutation of 0 … length - 1")
    array = array.astype(np.int64)
    array.setflags(write=False)
    return array


class Reordered(Mask):
    """The mask of tokens in another order."""

    def __init__(self, mask: Mask, order: np.ndarray):
        self.mask, self.order = mask, order
        self.batch, self.heads, self._is_fixed = mask.batch, mask.heads, mask._is_fixed

    def at(self, b, h):
        return Reordered(self.mask.at(b, h), self.order)

    def bind(self, q_len, kv_len):
        for name, length in (("q_len", q_len), ("kv_len", kv_len)):
            if length != len(self.order):
                raise MaskError(f"an order of {len(self.order)} tokens must have {name}={length}")
        return seen_through(self.mask.bind(q_len, kv_len), self.order)

    @property
    def _parts(self):
        return Reordered, self.mask.identity, Identity((self.order.tobytes(),))

    def __repr__(self):
        return f"reordered({self.mask!r}, <order of {len(self.order)}>)"


def seen_through(inner: pattern.Pattern, order: np.ndarray) -> pattern.Pattern:
    """The pattern that keeps (i, j) where `inner` keeps (order[i], order[j])."""
    again = functools.partial(seen_through, order=order)
    if isinstance(inner, pattern.And | pattern.Or):
        return type(inner)(again(inner.a), again(inner.b))
    if isinstance(inner, pattern.Not):
        return pattern.Not(again(inner.a))
    if isinstance(inner, pattern.Rows | pattern.Columns):
        return type(inner)(inner.member[order])
    if isinstance(inner, Box):
        return Box([axis.placed(axis.place[order]) for axis in inner.axes])
    return Permuted(inner, order)


class Permuted(pattern.Pattern):
    """Any pattern seen through an order: a block's tokens lie between their least and their greatest."""

    def __init__(self, inner: pattern.Pattern, order: np.ndarray):
        self.inner, self.order = inner, order

    def blocks(self, i0, i1, j0, j1, stride):
        return self.inner.blocks(*extremes(self.order, i0, i1), *extremes(self.order, j0, j1), 1)

    def keep(self, i, j):
        # Patterns want ascending tokens: they are asked in that order, and the answer is put back.
        rows, columns = self.order[i], self.order[j]
        by_row, by_column = np.argsort(rows, axis=1), np.argsort(columns, axis=1)
        kept = self.inner.keep(np.take_along_axis(rows, by_row, 1), np.take_along_axis(columns, by_column, 1))
        kept = np.broadcast_to(kept, (len(i), i.shape[1], j.shape[1]))
        kept = np.take_along_axis(kept, np.argsort(by_row, axis=1)[:, :, None], 1)
        return np.take_along_axis(kept, np.argsort(by_column, axis=1)[:, None, :], 2)
