"""Scatter kernels: they write updates to a tensor, at positions that another tensor gives.

The updates of one slice of the result are applied one after another; slices run in parallel, on CPUs and GPUs alike.
There are no atomic operations, and the result does not depend on threads: the last of several updates of one element
wins, and sums are added in the order of the updates.
"""

import json
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from tvm import DataType, tirx
from tvm.script import tirx as T

from tir_kernels.compiling.quick_script import quick_script


def _largest(old, new):
    return tirx.Select(tirx.any(old > new, old != old), old, new)  # NaN stays: PyTorch's maximum keeps it


def _smallest(old, new):
    return tirx.Select(tirx.any(old < new, old != old), old, new)


# The attribute `stof.scatter` of functions that are not `scatter`'s, which have its arguments there.
PERMUTED, IN_PLACE = "permuted", "in place"
WIDEST = 16  # bytes of one load
LONG = 1 << 31  # elements that 32-bit indices do not reach
REDUCTIONS = {
    "set": lambda old, new: new,
    "add": lambda old, new: old + new,
    "multiply": lambda old, new: old * new,
    "amax": _largest,
    "amin": _smallest,
}


class ScatterArguments(NamedTuple):
    """The arguments of `scatter`, which explains them; shapes are lists."""

    shape: list[int]
    updates: int
    index_shape: list[int]
    update_shape: list[int]
    dtype: str
    index_dtype: str
    reduction: str
    poison: float
    wraps: bool
    is_rising: bool = False

    @property
    def elements(self) -> tuple[int, ...]:
        """How many each tensor has."""
        return tuple(map(math.prod, (self.shape, self.index_shape, self.update_shape)))


def scatter(
    shape, updates, index_shape, update_shape, dtype, index_dtype, reduction, poison, wraps, is_rising: bool = False
):
    """A PrimFunc (x, index, update, out): out is x with out[o, index[o, m, i], i] = reduction(…, update[o, m, i]).

    Parameters
    ----------
    shape : (outer, n, inner)
        The shape of x and out, which have `dtype`.
    updates : int
        Number of updates of a slice (o, i): m = 0 … updates - 1.
    index_shape, update_shape : (outer or 1, updates or 1, inner or 1)
        The shapes of `index`, which has `index_dtype`, and of `update`.  A dimension of 1 is broadcast.
    reduction : str
        One of `REDUCTIONS`.
    poison : number
        Replaces the update if its index is outside 0 … n - 1; it is applied at the nearest position.
    wraps : bool
        Whether an index from -n to -1 counts from the end; else it is outside.
    is_rising : bool
        Whether it is known that all slices have one index, each number of it greater than the one before, and the last
        less than n above the first.
    """
    outer, n, inner = shape
    assert not is_rising or index_shape[0] == index_shape[2] == 1
    index_stride, update_stride = (tuple(int(n > 1) for n in shape) for shape in (index_shape, update_shape))
    combined, nearest = _writing(n, dtype, reduction, poison, wraps)
    arguments = [shape, updates, index_shape, update_shape, dtype, index_dtype, reduction, poison, wraps, is_rising]
    description = json.dumps(arguments)
    outers, rows, inners, times = _counted(outer, n, inner, updates, elements=ScatterArguments(*arguments).elements)

    with quick_script():

        @T.prim_func(private=True, s_tir=True)
        def scatter(
            x: T.Buffer((outer, n, inner), dtype),  # type: ignore[valid-type]
            index: T.Buffer(index_shape, index_dtype),  # type: ignore[valid-type]
            update: T.Buffer(update_shape, dtype),  # type: ignore[valid-type]
            out: T.Buffer((outer, n, inner), dtype),  # type: ignore[valid-type]
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "stof.scatter": description})
            for o, i in T.grid(outers, inners):
                with T.sblock("scatter"):
                    vo, vi = T.axis.remap("SS", [o, i])
                    T.reads(
                        x[vo, 0:n, vi],
                        index[0 : index_shape[0], 0 : index_shape[1], 0 : index_shape[2]],
                        update[0 : update_shape[0], 0 : update_shape[1], 0 : update_shape[2]],
                    )
                    T.writes(out[vo, 0:n, vi])
                    for k in range(rows):
                        out[vo, k, vi] = x[vo, k, vi]
                    for m in range(times):
                        position = T.cast(
                            index[vo * index_stride[0], m * index_stride[1], vi * index_stride[2]], "int64"
                        )
                        # The old value is not bound to a variable: TVM loses track of a variable in bfloat16.
                        out[vo, nearest(position), vi] = combined(
                            out[vo, nearest(position), vi],
                            update[vo * update_stride[0], m * update_stride[1], vi * update_stride[2]],
                            position,
                        )

    return scatter


def scatter_in_place(func, distinct: bool = False):
    """A PrimFunc (x, index, update) that writes into x what `func`, which `scatter` made, writes into its result.

    `writes_in_place(func)` holds: no element of x is read, so slices may be scheduled in any order.  If indices are
    `distinct`, all within x and of another position each in a slice, so may updates: a prompt has thousands.  Then
    elements that lie beside each other and have one index are copied 16 bytes at a time.  So it is where indices rise,
    for those outside of x meet others only in its first and last row, which are poison then whoever writes last.
    """
    how = scatter_arguments(func)
    assert how is not None
    distinct |= how.is_rising
    outer, n, inner = how.shape
    updates, index_shape, update_shape, dtype, index_dtype = how[1:6]
    index_stride, update_stride = (tuple(int(n > 1) for n in shape) for shape in (index_shape, update_shape))
    combined, nearest = _writing(n, dtype, how.reduction, how.poison, how.wraps)
    reached = _reaching(how, nearest)
    if lanes := _lanes(how) if distinct or updates == 1 else 0:
        return _rows_in_place(how, lanes, combined, nearest, reached)

    # One after another within a slice, or all at once.
    at_once, in_turn = (updates, 1) if distinct else (1, updates)
    outers, at_once, in_turn, inners = _counted(outer, at_once, in_turn, inner, elements=how.elements)

    with quick_script():

        @T.prim_func(private=True, s_tir=True)
        def scatter_in_place(
            x: T.Buffer((outer, n, inner), dtype),  # type: ignore[valid-type]
            index: T.Buffer(index_shape, index_dtype),  # type: ignore[valid-type]
            update: T.Buffer(update_shape, dtype),  # type: ignore[valid-type]
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "stof.scatter": IN_PLACE})
            for o, each, i in T.grid(outers, at_once, inners):
                with T.sblock("scatter"):
                    vo, first, vi = T.axis.remap("SSS", [o, each, i])
                    T.reads(
                        index[0 : index_shape[0], 0 : index_shape[1], 0 : index_shape[2]],
                        update[0 : update_shape[0], 0 : update_shape[1], 0 : update_shape[2]],
                    )
                    T.writes(x[vo, 0:n, vi])
                    for m in range(in_turn):
                        position = T.cast(
                            index[vo * index_stride[0], (first + m) * index_stride[1], vi * index_stride[2]], "int64"
                        )
                        x[vo, nearest(position), vi] = combined(
                            None,
                            update[vo * update_stride[0], (first + m) * update_stride[1], vi * update_stride[2]],
                            reached(index, position),
                        )

    return scatter_in_place


def _counted(*sizes: int, elements: Iterable[int]) -> list:
    """Extents of loops whose variables, times each other, are indices of tensors with so many elements."""
    return [tirx.const(n, "int64") if max(elements) >= LONG else n for n in sizes]


def _lanes(how: ScatterArguments) -> int:
    """How many elements of a row a thread can copy at once, 16 bytes at most; 0 where rows have no index in common."""
    inner, is_narrow = how.shape[2], how.dtype in ("bool", "int4", "uint4")
    if how.index_shape[2] != 1 or how.update_shape[2] != inner or is_narrow:
        return 0
    most = WIDEST // (DataType(how.dtype).bits // 8)
    while most > 1 and inner % most:
        most //= 2
    return most if most > 1 else 0


def _rows_in_place(how: ScatterArguments, lanes: int, combined, nearest, reached):
    """`scatter_in_place` of updates that may be written all at once, `lanes` elements of a row by a thread."""
    outer, n, inner = how.shape
    updates, index_shape, update_shape, dtype, index_dtype = how[1:6]
    index_stride, update_stride = (tuple(int(n > 1) for n in shape) for shape in (index_shape, update_shape))
    first = -n if how.wraps else 0
    outers, times, parts = _counted(outer, updates, inner // lanes, elements=how.elements)

    with quick_script():

        @T.prim_func(private=True, s_tir=True)
        def scatter_in_place(
            x: T.Buffer((outer, n, inner), dtype),  # type: ignore[valid-type]
            index: T.Buffer(index_shape, index_dtype),  # type: ignore[valid-type]
            update: T.Buffer(update_shape, dtype),  # type: ignore[valid-type]
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "stof.scatter": IN_PLACE})
            for o, m, part in T.grid(outers, times, parts):
                with T.sblock("scatter"):
                    vo, vm, vp = T.axis.remap("SSS", [o, m, part])
                    T.reads(
                        index[0 : index_shape[0], 0 : index_shape[1], 0],
                        update[0 : update_shape[0], 0 : update_shape[1], vp * lanes : vp * lanes + lanes],
                    )
                    T.writes(x[vo, 0:n, vp * lanes : vp * lanes + lanes])
                    position = T.cast(index[vo * index_stride[0], vm * index_stride[1], 0], "int64")
                    if tirx.all(reached(index, position) >= first, reached(index, position) < n):
                        for i in T.vectorized(lanes):
                            x[vo, nearest(position), vp * lanes + i] = update[
                                vo * update_stride[0], vm * update_stride[1], vp * lanes + i
                            ]
                    else:
                        for i in range(lanes):
                            x[vo, nearest(position), vp * lanes + i] = combined(
                                None,
                                update[vo * update_stride[0], vm * update_stride[1], vp * lanes + i],
                                reached(index, position),
                            )

    return scatter_in_place


def _writing(n: int, dtype: str, reduction: str, poison, wraps: bool):
    """(the new value of an element from its old one, an update and its index; where an index writes)."""
    combine, first = REDUCTIONS[reduction], -n if wraps else 0
    # TVM writes a NaN of bfloat16 as `nanf` in CUDA, which is no C++: there the choice is one of float32, and exact.
    chosen = "float32" if dtype == "bfloat16" else dtype
    poison = tirx.const(poison if "float" in dtype else int(poison), chosen)

    def combined(old, new, index):
        update = new if chosen == dtype else new.astype(chosen)
        update = tirx.Select(tirx.all(index >= first, index < n), update, poison)
        return combine(old, update if chosen == dtype else update.astype(dtype))

    def nearest(index):
        return tirx.max(tirx.min(tirx.Select(index < 0, index + n, index), n - 1), 0)

    return combined, nearest


def _reaching(how: ScatterArguments, nearest):
    """A function (index, position) that gives the position, or n, outside of x, where its row is to be poison.

    That is so where rising indices outside of x are moved to the same row.
    """
    n = how.shape[1]

    def reached(index, position):
        if not how.is_rising:
            return position
        lowest, highest = index[0, 0, 0], index[0, how.updates - 1, 0]
        is_below = tirx.all(lowest < -n, nearest(position) == 0)
        is_above = tirx.all(highest >= n, nearest(position) == n - 1)
        return tirx.Select(tirx.any(is_below, is_above), tirx.const(n, "int64"), position)

    return reached


def scatter_permuted(n, inner, dtype, index_dtype):
    """A PrimFunc (index, update, out): out[index[m], i] = update[m, i], of n rows of `inner` elements.

    `index` has every position once, so all rows are written, at the same time.
    """
    with quick_script():

        @T.prim_func(private=True, s_tir=True)
        def scatter_permuted(
            index: T.Buffer((n,), index_dtype),  # type: ignore[valid-type]
            update: T.Buffer((n, inner), dtype),  # type: ignore[valid-type]
            out: T.Buffer((n, inner), dtype),  # type: ignore[valid-type]
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8, "stof.scatter": PERMUTED})
            for m, i in T.grid(n, inner):
                with T.sblock("scatter"):
                    vm, vi = T.axis.remap("SS", [m, i])
                    T.reads(index[vm], update[vm, vi])
                    T.writes(out[0:n, vi])
                    out[T.min(T.max(index[vm], 0), n - 1), vi] = update[vm, vi]

    return scatter_permuted


def is_scatter(func) -> bool:
    """Whether a PrimFunc is one that `scatter` or `scatter_permuted` made."""
    return func.attrs is not None and "stof.scatter" in func.attrs


def writes_in_place(func) -> bool:
    """Whether `scatter_in_place` can replace a PrimFunc: `scatter` made it, and it sets elements."""
    arguments = scatter_arguments(func)
    return arguments is not None and arguments.reduction == "set"


def scatter_arguments(func) -> ScatterArguments | None:
    """The arguments of `scatter` if it made a PrimFunc, else None."""
    is_another = not is_scatter(func) or str(func.attrs["stof.scatter"]) in (PERMUTED, IN_PLACE)
    return None if is_another else ScatterArguments(*json.loads(str(func.attrs["stof.scatter"])))


def are_distinct(index: np.ndarray, how: ScatterArguments) -> bool:
    """Whether the indices of every slice are positions of x, each another one.

    `index` is int64 or int32, of as many elements as `how.index_shape` (outer, updates, inner) has.
    """
    n, (outer, updates, inner) = how.shape[1], how.index_shape
    positions = index.reshape(outer, updates, inner).astype(np.int64)
    positions = np.where(positions < 0, positions + n, positions) if how.wraps else positions
    if updates != how.updates or positions.size == 0 or positions.min() < 0 or positions.max() >= n:
        return False
    return bool((np.diff(np.sort(positions, axis=1), axis=1) > 0).all())


def is_permuting(func) -> bool:
    """Whether a PrimFunc is one that `scatter_permuted` made."""
    return is_scatter(func) and str(func.attrs["stof.scatter"]) == PERMUTED
