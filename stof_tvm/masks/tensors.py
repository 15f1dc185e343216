"""Masks from arrays: a boolean tensor as it is, or a layout of blocks."""

import numpy as np

from stof_tvm.masks.arguments import FixedArray, as_numpy, check_int, without_repeats
from stof_tvm.masks.mask import Grid, Leaf, Mask
from stof_tvm.masks.pattern import Layout
from tir_kernels.errors import MaskError


def from_tensor(tensor) -> Mask:
    """The mask of a tensor or array, where True or 0.0 is kept; it is read once, so later changes have no effect.

    Its shape is (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len); a side of 1 is broadcast.
    It is boolean, or in the additive form: floating point with nothing but 0 (kept) and -inf (masked).  MaskError
    for NaN and other numbers, which are no mask (additive scores belong in `bias=`), and, when the mask is used, for
    lengths that its shape does not fit.
    """
    keep = _boolean(as_numpy("mask", tensor))
    return _grid_of("mask", keep, _whole_tensor, f"from_tensor(<bool {'×'.join(map(str, keep.shape))}>)")


def block_sparse(layout, block) -> Mask:
    """Keeps the blocks that are nonzero in `layout`.

    `layout` is boolean or 0/1, (R, C), (heads, R, C) or (batch, heads, R, C); `block` is a positive int or a pair
    (height, width), any size.  The last row and column of blocks may be cut by the lengths: R must be
    ceil(q_len / height) and C ceil(kv_len / width), else MaskError.
    """
    height, width = block if isinstance(block, (tuple, list)) and len(block) == 2 else (block, block)
    height, width = check_int("block height", height, least=1), check_int("block width", width, least=1)
    cells = as_numpy("layout", layout)
    if cells.dtype != np.bool_:
        wrong = (cells != 0) & (cells != 1)
        if cells.dtype.kind not in "iuf" or wrong.any():
            found = cells[wrong][0] if cells.dtype.kind in "iuf" else cells.dtype
            raise MaskError(f"layout must be boolean or 0 and 1, got {found}")
        cells = cells != 0

    return _grid_of(
        "layout",
        cells,
        lambda cells: block_layout(cells, height, width),
        f"block_sparse(<bool {'×'.join(map(str, cells.shape))}>, {(height, width)})",
    )


def block_layout(cells: FixedArray, height: int, width: int) -> Leaf:
    """The mask of one 2-D layout with cells of height × width."""

    def bind(q_len, kv_len):
        rows, columns = -(-q_len // height), -(-kv_len // width)
        if cells.array.shape != (rows, columns):
            raise MaskError(
                f"a layout of {height}×{width} blocks has shape {cells.array.shape}, "
                f"must have {(rows, columns)} at (q_len, kv_len) = {(q_len, kv_len)}"
            )
        return Layout(cells.array, height, width)

    arguments = {"layout": cells.key, "block": (height, width)}
    return Leaf(block_sparse, arguments, bind, source=(block_layout, (cells, height, width)))


def _whole_tensor(cells: FixedArray) -> Mask:
    def bind(q_len, kv_len):
        try:
            return Layout(np.broadcast_to(cells.array, (q_len, kv_len)), 1, 1)
        except ValueError:
            raise MaskError(
                f"a mask of shape {cells.array.shape} does not fit (q_len, kv_len) = {(q_len, kv_len)}"
            ) from None

    return Leaf(from_tensor, {"tensor": cells.key}, bind, source=(_whole_tensor, (cells,)))


def _grid_of(name: str, array: np.ndarray, leaf, text: str) -> Mask:
    """The leaf of a 2-D array; for 3 or 4 dimensions a grid with a leaf for each 2-D slice; equal slices share one."""
    if array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise MaskError(f"a {name} has 2 to 4 dimensions, none of them 0, got shape {array.shape}")
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    # A dimension that a view repeats (stride 0) is the same for all.
    array = array[tuple(slice(0, 1) if array.strides[k] == 0 else slice(None) for k in (0, 1))]
    if array.shape[:2] == (1, 1):
        return leaf(FixedArray(array[0, 0]))
    known = {}

    def entry(pattern):
        cells = FixedArray(pattern)
        if cells.key not in known:
            known[cells.key] = leaf(cells)
        return known[cells.key]

    return Grid([[entry(pattern) for pattern in row] for row in array], text)


def _boolean(array: np.ndarray) -> np.ndarray:
    """Which elements of a mask are kept, from its boolean or its additive form."""
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind != "f":
        raise MaskError(
            f"a mask must be boolean, or floating point with 0 and -inf, got {array.dtype}: one of 1 (kept) and 0 is "
            "mask.bool()"
        )
    scores = without_repeats(array)
    if np.isnan(scores).any():
        raise MaskError(f"the mask holds NaN at index {_first(np.isnan(scores))}")
    keep = scores == 0
    other = ~keep & (scores != -np.inf)
    if other.any():
        at = _first(other)
        remedy = "one of 1 (kept) and 0 is mask.bool()" if scores[at] == 1 else "additive scores belong in bias="
        raise MaskError(
            f"the mask holds {scores[at]} at index {at}; a floating-point mask is 0 (kept) or -inf (masked), and "
            f"{remedy}"
        )
    return np.broadcast_to(keep, array.shape)


def _first(found: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(found.argmax(), found.shape))
