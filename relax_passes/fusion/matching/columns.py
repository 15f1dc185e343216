"""Which columns of a matrix a view of it has, whatever reshapes, slices and splits lead to it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings, shape_of
from relax_passes.ir.strided_views import slice_bounds


def columns_of(bindings: Bindings, expr, is_matrix: Callable, m: int, n: int) -> Sequence[int] | None:
    """The columns of a matrix (m, n) that `expr` has of each row, in its order; a range if they are evenly spaced.

    None for anything else than columns.  `is_matrix(expr)` tells the matrix itself, through reshapes.
    """
    found = _places(bindings, expr, is_matrix, m, n)
    if found is None or found.size < 2:
        return None
    first, second = (int(place) for place in found.flat[:2])
    columns = range(first, first + (second - first) * found.size, second - first) if second > first else range(0)
    return columns if np.array_equal(found.ravel(), columns) else tuple(found.ravel().tolist())


def _places(bindings: Bindings, expr, is_matrix: Callable, m: int, n: int) -> np.ndarray | None:
    """The columns, an array of the dimensions of `expr` behind those of the rows; None if rows are cut or moved."""
    shape = shape_of(expr)
    if is_matrix(expr):
        return _behind_rows(np.arange(n), shape, m)
    bound = bindings.values.get(expr) if isinstance(expr, relax.Var) else None
    inner = bound if isinstance(bound, relax.Var) else bindings.same_elements(expr)
    if inner is not None:
        source = _places(bindings, inner, is_matrix, m, n)
        return None if source is None else _behind_rows(source, shape, m)
    if isinstance(bound, relax.TupleGetItem):
        call = bindings.call(bound.tuple_value, "split")
        if call is None:
            return None
        axis = int(call.attrs.axis) % len(shape)
        lengths = [int(field.shape[axis]) for field in call.ty.fields]
        begin = sum(lengths[: bound.index])
        bounds = {axis: (begin, begin + lengths[bound.index], 1)}
    else:
        call = bindings.call(expr, "strided_slice")
        known = None if call is None else slice_bounds(call)
        if call is None or known is None:
            return None
        bounds = known
    source = _places(bindings, call.args[0], is_matrix, m, n)
    if source is None:
        return None
    whole, rows = shape_of(call.args[0]), len(shape) - source.ndim
    cut = {axis: slice(*bound) for axis, bound in bounds.items() if bound != (0, whole[axis], 1)}
    if any(axis < rows for axis in cut):
        return None
    return source[tuple(cut.get(axis, slice(None)) for axis in range(rows, len(shape)))]


def _behind_rows(places: np.ndarray, shape: tuple[int, ...], m: int) -> np.ndarray | None:
    """The places in the dimensions of `shape` that follow those whose product is m; None if there are no such."""
    rows = next((k for k in range(len(shape) + 1) if math.prod(shape[:k]) == m), None)
    return None if rows is None or math.prod(shape[rows:]) != places.size else places.reshape(shape[rows:])
