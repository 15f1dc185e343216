"""The operators that take the rows of a selection out of a tensor."""

import math
from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import dtype_of, shape_of
from relax_passes.ir.constant_arrays import array_of
from relax_passes.read_rows.places import NotMoved, Place, Spread
from relax_passes.read_rows.selections import Reader, Selection

op = relax.op


class RowTaker:
    """Emits selected rows of tensors, the rows' numbers once.

    `emit` emits an expression, and `new` writes one of the old function in variables of the new one.  With `are_inside`
    an index, int64 (count,), is known to have rows only.
    """

    def __init__(self, selection: Selection, emit: Callable, new: Callable, are_inside: bool = False):
        self.selection, self.emit, self.new, self.are_inside = selection, emit, new, are_inside
        self._numbers: relax.Expr | None = None
        self._flat: relax.Expr | None = None

    def numbers(self) -> relax.Expr:
        """int64 (count,) or (batch, count), 0 to size - 1: the rows that a run-time selection reads."""
        if self._numbers is None:
            numbers = self._bare() if self.are_inside else self._clipped(self._bare())
            lead = (self.selection.batch,) if self.selection.batch else ()
            self._numbers = self._reshaped(numbers, (*lead, self.selection.count))
        return self._numbers

    def _bare(self) -> relax.Expr:
        """The index, or the elements that count of one of gather_elements, the batch first."""
        index, place = self.new(self.selection.index), self.selection.gathered
        if place is None:
            return index
        rank = len(shape_of(index))
        others = [axis for axis in range(rank) if axis not in place.axes and shape_of(index)[axis] > 1]
        if others:
            zeros, ones = [0] * len(others), [1] * len(others)
            index = self.emit(op.strided_slice(index, others, zeros, ones, ones))
        if place.batch is not None and place.batch.axis > place.rows.axis:
            order = [place.batch.axis, place.rows.axis]
            index = self.emit(op.permute_dims(index, [*order, *(n for n in range(rank) if n not in order)]))
        return index

    def _clipped(self, index) -> relax.Expr:
        if dtype_of(index) != "int64":
            index = self.emit(op.astype(index, "int64"))
        index = self.emit(op.minimum(index, relax.const(self.selection.size - 1, "int64")))
        return self.emit(op.maximum(index, relax.const(0, "int64")))

    def taken(self, x, place: Place | Spread) -> relax.Expr:
        """The rows of a tensor."""
        if isinstance(place, Spread):
            return self._spread(x, place)
        shape = shape_of(x)
        sizes, apart = place.apart(shape)
        axis = apart.rows.axis
        rows = self.selection.rows
        if rows is not None and isinstance(x, GenericConst):
            array = array_of(x).reshape(sizes).take(rows, axis).reshape(place.narrowed(shape, len(rows)))
            return relax.const(array, dtype_of(x))
        x = self._reshaped(x, sizes)
        if rows is not None:
            x = self._constant_rows(x, axis, rows)
        elif apart.batch is None:
            x = self.emit(op.take(x, self.numbers(), axis=axis, mode="clip"))
        else:
            x = self._of_each_entry(x, sizes, apart)
        return self._reshaped(x, place.narrowed(shape, self.selection.count))

    def _constant_rows(self, x, axis: int, rows: np.ndarray) -> relax.Expr:
        first, step = int(rows[0]), int(rows[1] - rows[0]) if len(rows) > 1 else 1
        if step > 0 and np.array_equal(rows, np.arange(first, int(rows[-1]) + 1, step)):
            return self.emit(op.strided_slice(x, [axis], [first], [int(rows[-1]) + 1], [step]))
        return self.emit(op.take(x, relax.const(rows, "int64"), axis=axis, mode="clip"))

    def _of_each_entry(self, x, sizes, place: Place) -> relax.Expr:
        """Rows of each batch entry, a tensor whose batch and rows are axes."""
        assert place.batch is not None
        batch, axis, count = place.batch.axis, place.rows.axis, self.selection.count
        shape = place.narrowed(sizes, count)
        if axis == batch + 1:  # one axis of all entries' rows
            x = self._reshaped(x, (*sizes[:batch], sizes[batch] * sizes[axis], *sizes[axis + 1 :]))
            return self._reshaped(self.emit(op.take(x, self._flat_numbers(), axis=batch, mode="clip")), shape)
        index = self.numbers()
        if axis < batch:
            index = self.emit(op.permute_dims(index, [1, 0]))
        index = self._reshaped(index, [n if axis in (place.rows.axis, batch) else 1 for axis, n in enumerate(shape)])
        return self.emit(op.gather_elements(x, self.emit(op.broadcast_to(index, shape)), axis=axis))

    def _flat_numbers(self) -> relax.Expr:
        """int64 (batch * count,): rows among those of all batch entries."""
        if self._flat is None:
            batch, count, size = self.selection.batch, self.selection.count, self.selection.size
            first = relax.const(np.arange(batch)[:, None] * size, "int64")
            self._flat = self._reshaped(self.emit(op.add(self.numbers(), first)), (batch * count,))
        return self._flat

    def _spread(self, x, place: Spread) -> relax.Expr:
        """Rows of each batch entry, of a tensor that is the same for all entries."""
        shape, axis, batch, count = shape_of(x), place.rows.axis, self.selection.batch, self.selection.count
        if shape[axis] != self.selection.size:
            raise NotMoved
        numbers = self._reshaped(self.numbers(), (batch * count,))
        x = self.emit(op.take(x, numbers, axis=axis, mode="clip"))
        x = self._reshaped(x, (*shape[:axis], batch, count, *shape[axis + 1 :]))
        lead = place.rank - len(shape)
        order = [axis] if place.batch < lead else []
        for old in range(len(shape)):
            if old == place.batch - lead:  # one element, whose place the batch takes
                order.append(axis)
            order.append(old + (old >= axis))
        if order != sorted(order):
            x = self.emit(op.permute_dims(x, order))
        full = [1] * lead + list(shape)
        full[place.batch], full[place.place] = batch, count
        return self._reshaped(x, full)

    def result(self, rows, var: relax.Var, reader: Reader) -> relax.Expr:
        """What a selection gives, from the rows that it reads."""
        shape = shape_of(var)
        rows = self._reshaped(rows, shape)
        if reader.outside is None:
            return rows
        index, size, axis = self.new(reader.outside[0]), *reader.outside[1:]
        dtype, sizes = dtype_of(index), shape_of(index)
        not_before = self.emit(op.greater_equal(index, relax.const(0, dtype)))
        inside = self.emit(op.logical_and(not_before, self.emit(op.less(index, relax.const(size, dtype)))))
        inside = self._reshaped(inside, (*(1,) * axis, *sizes, *(1,) * (len(shape) - axis - len(sizes))))
        return op.where(inside, rows, relax.const(math.nan, dtype_of(rows)))

    def _reshaped(self, x, shape) -> relax.Expr:
        return x if tuple(shape) == shape_of(x) else self.emit(op.reshape(x, tuple(shape)))
