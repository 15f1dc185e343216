"""Runs of rows, each after the other: known in advance, or at distances from a number that is given at run time.

strided_slice(x, [1], [5], [8])                                        rows 5 to 7
take(x, arange(5, 8), axis=1)                                          the same
take(x, minimum(maximum(n, 6), 9) + arange(-2, 1), axis=1)             rows n - 2 to n, of which 4 to 9 can be any
"""

from dataclasses import dataclass

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.read_rows.distances import Anchor, Distances
from relax_passes.read_rows.places import Digit, Place
from relax_passes.read_rows.selections import sliced_axis


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
        self._distances = Distances(bindings)
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
        return list(dict.fromkeys(run.anchor for run in self.found.values()))

    def _slice(self, call) -> Run | None:
        if (found := sliced_axis(call)) is None:
            return None
        axis, (first, end, step) = found
        if step != 1 or first >= end:
            return None
        place = Place(Digit(axis, shape_of(call.args[0])[axis]))
        return Run(call.args[0], place, self._distances.anchors[0], Span(first, end))

    def _take(self, call) -> Run | None:
        source, index = call.args
        shape = static_shape(index)
        if call.attrs.axis is None or shape is None or len(shape) > 1 or index.same_as(source):
            return None
        if (found := self._distances.of(index)) is None:
            return None
        anchor, distances = found
        rows = distances.reshape(-1)
        axis = int(call.attrs.axis) % len(shape_of(source))
        size = shape_of(source)[axis]
        span = Span(int(rows[0]), int(rows[-1]) + 1)
        is_inside = anchor.least + span.start >= 0 and anchor.most + span.stop <= size
        is_run = bool((np.diff(rows) == 1).all())
        return Run(source, Place(Digit(axis, size)), anchor, span) if is_run and is_inside else None
