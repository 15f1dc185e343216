"""Find selections of rows: operators that read at most half of an axis, at places that are constants or given.

    strided_slice(x, [1], [31], [32])                        rows known in advance, also as a take
    take(x, index, axis=1)                                   rows given at run time
    gather_elements(x, broadcast_to(index, …), axis=1)       the same, or rows of each batch entry
    take(reshape(x), arange(batch) * size + index, axis=0)   a row of each batch entry

Selections of the same rows are taken together, whatever tensors they read.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of
from relax_passes.ir.same_values import same
from relax_passes.parallel.placement import NotShardable
from relax_passes.parallel.rules import BINARY, UNARY, sliced_at, tensors_of
from relax_passes.read_rows.merged_index import rows_of_entries
from relax_passes.read_rows.places import Digit, Place

LARGEST_INDEX = 1 << 20  # rows known in advance that are looked at


@dataclass(frozen=True)
class Reader:
    """A selection of one tensor: `source`, whose rows are at `place`.

    With `outside`, (index, size, axis), the result is NaN where the index is none from 0 to size - 1; its dimensions
    stand in the result from the axis on.
    """

    source: relax.Var
    place: Place
    outside: tuple[relax.Expr, int, int] | None = None


@dataclass
class Selection:
    """All selections of the same `count` of `size` rows, by the variables that they are bound to.

    Attributes
    ----------
    rows : int64 (count,) or None
        The rows, 0 to size - 1, where they are constants.
    index : relax.Expr or None
        Else an expression of the function that gives them.
    gathered : Place or None
        Where they are in `index`, if it is one of gather_elements: along other axes all elements are the same.
    batch : int
        How many batch entries have rows of their own; 0 where all have the same.
    """

    size: int
    count: int
    rows: np.ndarray | None
    index: relax.Expr | None
    gathered: Place | None = None
    batch: int = 0
    readers: dict[relax.Var, Reader] = field(default_factory=dict)


class SelectionFinder:
    """Finds the selections of one function."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.found: list[Selection] = []
        finders = {"strided_slice": self._slice, "take": self._take, "gather_elements": self._gather}
        for var, value in bindings.values.items():
            finder = finders.get(operator(value))
            if finder is None or static_shape(var) is None or value.args[0] not in bindings.values:
                continue
            if static_shape(value.args[0]) is not None and (one := finder(value)) is not None:
                self._add(var, *one)

    def _add(self, var: relax.Var, new: Selection, reader: Reader) -> None:
        if not 0 < 2 * new.count <= new.size:
            return
        for known in self.found:
            if self._is_same(known, new):
                known.readers[var] = reader
                return
        new.readers[var] = reader
        self.found.append(new)

    def _is_same(self, a: Selection, b: Selection) -> bool:
        if (a.size, a.count, a.gathered, a.batch) != (b.size, b.count, b.gathered, b.batch):
            return False
        if a.rows is not None and b.rows is not None:
            return np.array_equal(a.rows, b.rows)
        return a.index is not None and b.index is not None and same(self.bindings, a.index, b.index)

    def _slice(self, call) -> tuple[Selection, Reader] | None:
        if (found := sliced_axis(call)) is None:
            return None
        axis, (first, end, step) = found
        size = shape_of(call.args[0])[axis]
        rows = np.arange(first, end, step)
        return Selection(size, len(rows), rows, None), Reader(call.args[0], Place(Digit(axis, size)))

    def _take(self, call) -> tuple[Selection, Reader] | None:
        source, index = call.args
        shape, mode = shape_of(source), str(call.attrs.mode)
        if call.attrs.axis is None and len(shape) != 1 or static_shape(index) is None or mode == "wrap":
            return None
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(shape)
        size, count, value = shape[axis], math.prod(shape_of(index)), self.bindings.value(index)
        reader = Reader(source, Place(Digit(axis, size)))
        if not isinstance(value, GenericConst):
            if index.same_as(source) or not dtype_of(index).startswith("int"):
                return None
            if mode == "nan":
                if "float" not in dtype_of(source):
                    return None
                reader = replace(reader, outside=(index, size, axis))
                if count > 1 and (rows := rows_of_entries(self.bindings, index, size)) is not None:
                    size //= count
                    place = Place(Digit(axis, size, count), Digit(axis, count))
                    return Selection(size, 1, None, rows, batch=count), replace(reader, place=place)
            return Selection(size, count, None, index), reader
        if count > LARGEST_INDEX:
            return None
        rows = array_of(value).reshape(-1).astype(np.int64)
        if ((rows < 0) | (rows >= size)).any():
            return None
        return Selection(size, count, rows, None), reader

    def _gather(self, call) -> tuple[Selection, Reader] | None:
        source, index = call.args
        shape, lengths = shape_of(source), static_shape(index)
        axis = int(call.attrs.axis) % len(shape)
        if lengths is None or (*lengths[:axis], shape[axis], *lengths[axis + 1 :]) != shape:
            return None
        varying = [n for n in range(len(shape)) if n != axis and not self._is_uniform(index, n)]
        if len(varying) > 1 or index.same_as(source) or not dtype_of(index).startswith("int"):
            return None
        size, count = shape[axis], lengths[axis]
        batch = Digit(varying[0], shape[varying[0]]) if varying else None
        place = Place(Digit(axis, size), batch)
        return Selection(size, count, None, index, place, 0 if batch is None else batch.size), Reader(source, place)

    def _is_uniform(self, expr, axis: int) -> bool:
        """Whether the elements of a tensor of integers are the same along an axis."""
        while (shape := static_shape(expr)) is not None:
            if not 0 <= axis < len(shape) or shape[axis] == 1:
                return True
            call = self.bindings.value(expr)
            name = operator(call)
            if name == "broadcast_to" or name in UNARY:
                inner = shape_of(call.args[0])
                axis, expr = axis - len(shape) + len(inner), call.args[0]
            elif name in BINARY or name == "where":
                return all(self._is_uniform(x, axis - len(shape) + len(shape_of(x))) for x in tensors_of(call))
            else:
                return False
        return False


def sliced_axis(call) -> tuple[int, tuple[int, int, int]] | None:
    """(axis, (first, end, step)) of a strided_slice along one axis; None for another."""
    try:
        taken = sliced_at(call)
    except NotShardable:
        return None
    return next(iter(taken.items())) if len(taken) == 1 else None
