"""Runs of rows, each after the other: known in advance, or at distances from a number that is given at run time.

strided_slice(x, [1], [5], [8])                                        rows 5 to 7
take(x, arange(5, 8), axis=1)                                          the same
take(x, minimum(maximum(n, 6), 9) + arange(-2, 1), axis=1)             rows n - 2 to n, of which 4 to 9 can be any
"""

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, element_count, operator, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.same_values import same
from relax_passes.legalizations.closed_values import closed_values
from relax_passes.parallel.placement import NotShardable
from relax_passes.parallel.rules import sliced_at
from relax_passes.read_rows.places import Digit, Place

LONGEST = 1 << 20  # rows of a run
UNKNOWN = 1 << 62  # a bound that is none


@dataclass(frozen=True)
class Anchor:
    """What rows are counted from: 0, or an integer of one element, `expr`, of `least` to `most`."""

    expr: relax.Expr | None = None
    least: int = 0
    most: int = 0


@dataclass(frozen=True)
class Span:
    """Rows from `start` to `stop` - 1, counted from an anchor."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def joined(self, other: "Span") -> "Span":
        """The least run that holds both."""
        return Span(min(self.start, other.start), max(self.stop, other.stop))


@dataclass(frozen=True)
class Run:
    """A read of a run of rows of `source`, and of nothing else."""

    source: relax.Var
    place: Place
    anchor: Anchor
    span: Span


class RunFinder:
    """Finds the reads of runs of rows in a function.

    Attributes
    ----------
    found : dict of relax.Var to Run
        By the variables that what is read is bound to.
    """

    def __init__(self, bindings: Bindings):
        self.bindings, self._closed = bindings, ClosedExpressions(bindings)
        self._anchors: list[Anchor] = [Anchor()]
        self.found: dict[relax.Var, Run] = {}
        finders = {"strided_slice": self._slice, "take": self._take}
        for var, value in bindings.values.items():
            finder = finders.get(operator(value))
            if finder is None or static_shape(var) is None or value.args[0] not in bindings.values:
                continue
            if static_shape(value.args[0]) is not None and (run := finder(value)) is not None:
                self.found[var] = run

    @property
    def anchors(self) -> list[Anchor]:
        """All that runs are counted from, in order."""
        return [anchor for anchor in self._anchors if any(run.anchor is anchor for run in self.found.values())]

    def _slice(self, call) -> Run | None:
        try:
            taken = sliced_at(call)
        except NotShardable:
            return None
        if len(taken) != 1:
            return None
        ((axis, (first, end, step)),) = taken.items()
        place = Place(Digit(axis, shape_of(call.args[0])[axis]))
        return Run(call.args[0], place, self._anchors[0], Span(first, end)) if step == 1 and first < end else None

    def _take(self, call) -> Run | None:
        source, index = call.args
        shape = static_shape(index)
        if call.attrs.axis is None or shape is None or len(shape) > 1 or not dtype_of(index).startswith("int"):
            return None
        axis = int(call.attrs.axis) % len(shape_of(source))
        size = shape_of(source)[axis]
        found = self._offsets(index)
        if found is None or index.same_as(source):
            return None
        base, offsets = found
        if not 0 < len(offsets) <= LONGEST or not (np.diff(offsets) == 1).all():
            return None
        span = Span(int(offsets[0]), int(offsets[-1]) + 1)
        anchor = self._anchor(base)
        is_inside = anchor.least + span.start >= 0 and anchor.most + span.stop <= size
        return Run(source, Place(Digit(axis, size)), anchor, span) if is_inside else None

    def _offsets(self, index) -> tuple[relax.Expr | None, np.ndarray] | None:
        """(base, int64 (count,)): an index is a number of one element, or 0 for None, and these numbers."""
        if element_count(index) is None:
            return None
        if self._is_closed(index):
            return None, self._values(index)
        value = self.bindings.value(index)
        name = operator(value)
        if name in SAME_ELEMENTS or (name == "astype" and dtype_of(value) == "int64"):
            return self._offsets(value.args[0]) if dtype_of(value.args[0]).startswith("int") else None
        if name in ("add", "subtract") and dtype_of(value) == "int64":
            one, other = value.args
            if name == "add" and self._is_closed(one):
                one, other = other, one
            if self._is_closed(other) and (inner := self._offsets(one)) is not None:
                base, offsets = inner
                values = self._values(other)
                offsets = offsets - values if name == "subtract" else offsets + values
                return (base, offsets) if len(offsets) == element_count(index) else None
        return (index, np.zeros(1, np.int64)) if element_count(index) == 1 else None

    def _is_closed(self, expr) -> bool:
        return isinstance(expr, GenericConst) or self._closed.is_closed(expr)

    def _values(self, expr) -> np.ndarray:
        return closed_values(self.bindings, [expr])[0].reshape(-1).astype(np.int64)

    def _anchor(self, base) -> Anchor:
        if base is None:
            return self._anchors[0]
        for anchor in self._anchors[1:]:
            if same(self.bindings, anchor.expr, base):
                return anchor
        self._anchors.append(Anchor(base, *self._bounds(base)))
        return self._anchors[-1]

    def _bounds(self, expr) -> tuple[int, int]:
        """(least, largest) number that an expression can be, UNKNOWN where that is not known."""
        if self._is_closed(expr) and element_count(expr) == 1:
            (number,) = self._values(expr)
            return int(number), int(number)
        value = self.bindings.value(expr)
        name = operator(value)
        if name in SAME_ELEMENTS:
            return self._bounds(value.args[0])
        if name in ("maximum", "minimum"):
            choose = max if name == "maximum" else min
            (a, b), (c, d) = (self._bounds(x) for x in value.args)
            return choose(a, c), choose(b, d)
        return -UNKNOWN, UNKNOWN
