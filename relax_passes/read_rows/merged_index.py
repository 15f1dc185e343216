"""Indices into batch and rows merged to one axis: x[arange(batch), index] reads a row of each batch entry.

    take(reshape(x, (batch * size, …)), where(inside, arange(batch) * size + row, batch * size), mode="nan")

`row` is where(index < 0, index + size, index), and `inside` says that -size <= index < size.  Then each number lies
among the rows of its batch entry, or outside of all.
"""

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.same_values import same
from relax_passes.legalizations.closed_values import closed_values


def rows_of_entries(bindings: Bindings, index, total: int) -> relax.Expr | None:
    """The rows, int (batch,), of which each number of `index` (batch,) into `total` rows is one; None if not known."""
    index = _unwrapped(bindings, index, total)
    chosen, shape = bindings.call(index, "where"), static_shape(index)
    if chosen is None or shape is None or len(shape) != 1:
        return None
    batch = shape[0]
    keep, inside, outside = chosen.args
    if total % batch or bindings.scalar(outside) != total or (sums := bindings.call(inside, "add")) is None:
        return None
    size = total // batch
    one, other = sums.args
    for first, row in ((one, other), (other, one)):
        place = _unwrapped(bindings, row, size)
        if row.same_as(place) or static_shape(row) != (batch,):
            continue
        if _is_bounded(bindings, keep, place, size) and _begins(bindings, first, batch, size):
            return row
    return None


def _unwrapped(bindings: Bindings, index, size: int):
    """i where `index` is where(i < 0, i + size, i); else `index` itself."""
    call = bindings.call(index, "where")
    if call is None:
        return index
    condition, wrapped, inner = call.args
    less, moved = bindings.call(condition, "less"), bindings.call(wrapped, "add")
    if less is None or moved is None or bindings.scalar(less.args[1]) != 0 or bindings.scalar(moved.args[1]) != size:
        return index
    return inner if same(bindings, less.args[0], inner) and same(bindings, moved.args[0], inner) else index


def _is_bounded(bindings: Bindings, keep, index, size: int) -> bool:
    """Whether a condition implies -size <= index < size."""
    pending, found = [keep], set()
    while pending:
        call = bindings.call(pending.pop(), "logical_and", "greater_equal", "less")
        if call is None:
            continue
        if call.op.name == "relax.logical_and":
            pending += list(call.args)
        elif same(bindings, call.args[0], index):
            found.add((call.op.name, bindings.scalar(call.args[1])))
    return {("relax.greater_equal", -size), ("relax.less", size)} <= found


def _begins(bindings: Bindings, first, batch: int, size: int) -> bool:
    """Whether a value is the number of each batch entry's first row."""
    if static_shape(first) != (batch,) or not ClosedExpressions(bindings).is_closed(first):
        return False
    return np.array_equal(closed_values(bindings, [first])[0], np.arange(batch) * size)
