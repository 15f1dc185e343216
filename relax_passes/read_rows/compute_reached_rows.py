"""Compute only the rows from which windows lead to what is read: a last token reads one window a layer before it.

    x = attend(x, window) …, x[:, -1:]     →     x = attend(x[:, -1:], keys of the last window) …

Preconditions: those of `ComputeReadRows`, which does the same for attentions that read all keys.  Demands (demands.py)
go from reads of runs of rows, and through attentions, whose masks go by distance (windows.py), to queries and to keys.
Rows may be counted from a number that is given at run time, if it is known to lie between two numbers between which
all rows lie inside.  Values are taken of whole ones once, and then computed as if the sequence were that short.
"""

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import NOTES
from relax_passes.ir.bindings import Bindings, element_count, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild, substitute
from relax_passes.read_rows.demands import Demand, Demands
from relax_passes.read_rows.distances import Anchor
from relax_passes.read_rows.emitted import RowTaker
from relax_passes.read_rows.moves import with_operands
from relax_passes.read_rows.places import Digit, Place
from relax_passes.read_rows.selections import Selection
from relax_passes.read_rows.spans import RunFinder, Span
from relax_passes.read_rows.windows import AttentionWindows

op = relax.op
SMALL = 1 << 12  # elements of what an anchor is computed from
SMALL_COUNT = 64  # operators
NOTE = "computed for {} of its {} queries, of {} keys: nothing reads the others"


@tvm.transform.module_pass(opt_level=0, name="ComputeReachedRows")
class ComputeReachedRows:
    """Narrow the values of "main" to the rows that runs of rows are computed from.

    Parameters
    ----------
    windows : AttentionWindows or None
        Narrows attentions; None leaves the module as it is.
    """

    def __init__(self, windows: AttentionWindows | None = None):
        self.windows = windows

    def transform_module(self, mod, _ctx):
        if self.windows is None or not all(isinstance(x, relax.DataflowBlock) for x in mod["main"].body.blocks):
            return mod
        while (narrowed := _narrowed(mod, self.windows)) is not None:
            mod = narrowed
        return mod


def _narrowed(mod, windows: AttentionWindows) -> tvm.IRModule | None:
    """The module with the values narrowed that are read at rows counted from one anchor; None where there are none."""
    bindings = Bindings(mod["main"])
    runs = RunFinder(bindings)
    closed = ClosedExpressions(bindings).closed_vars
    for anchor in runs.anchors:
        demands = Demands(mod, bindings, runs.found, anchor, closed, windows.keys)
        if demands.of and _is_small(bindings, anchor):
            return _Narrowed(mod, bindings, demands, windows).transform()
    return None


def _is_small(bindings: Bindings, anchor: Anchor) -> bool:
    """Whether an anchor is computed from the function's inputs by few operators of few elements."""
    pending = [] if anchor.expr is None else [*relax.analysis.free_vars(anchor.expr)]
    seen: set[relax.Var] = set()
    while pending:
        var = pending.pop()
        if var in seen or var not in bindings.values:
            continue
        seen.add(var)
        value, count = bindings.values[var], element_count(var)
        is_known = isinstance(value, relax.Var) or operator(value) and operator(value) != "matmul"
        if not is_known or count is None or count > SMALL or len(seen) > SMALL_COUNT:
            return False
        pending += bindings.reads[var]
    return True


class _Narrowed:
    """The program in which demands are met."""

    def __init__(self, mod, bindings: Bindings, demands: Demands, windows: AttentionWindows):
        self.mod, self.bindings, self.demands, self.windows = mod, bindings, demands, windows
        self.notes = [] if mod.attrs is None else list(mod.attrs.get(NOTES, []))
        self.numbers: dict[Span, relax.Expr] = {}  # int64 (count,): rows of a whole value
        self.early: dict[relax.Var, relax.Expr] = {}  # what the anchor is computed from
        self.taken: dict[tuple, relax.Expr] = {}  # (value of the old program, place, span) -> its rows
        # (whole value, place) -> the span of all rows that are taken: they are taken once, of these come the others.
        self.spans: dict[tuple, Span] = {}
        for var in demands.of:
            for x, demand in demands.operands(var):
                if demand is not None and x not in demands.of:
                    known = self.spans.get((x, demand.place), demand.span)
                    self.spans[x, demand.place] = known.joined(demand.span)

    def transform(self) -> tvm.IRModule:
        """The module."""
        mod = rebuild(self.mod, self._replaced)
        return mod.with_attr(NOTES, self.notes) if self.notes else mod

    def _replaced(self, builder, var, new: Callable):
        demands = self.demands
        if var not in demands.of:
            run = demands.runs.get(var)
            if run is None or run.source not in demands.of:
                return None
            rows = self._rows(builder.emit, new, run.source, Demand(run.place, run.span))
            return rows if shape_of(rows) == shape_of(var) else op.reshape(rows, shape_of(var))
        demand = demands.of[var]
        if isinstance(value := self.bindings.values[var], relax.TupleGetItem):
            return self._field(builder.emit, new, value, demand)
        pairs = demands.operands(var)
        operands = [new(x) if needed is None else self._rows(builder.emit, new, x, needed) for x, needed in pairs]
        if (call := demands.attention(var)) is None:
            return with_operands(value, operands, demand.place, demand.span.count)
        _, (_, of_keys), *_ = pairs
        assert of_keys is not None
        size = demand.place.rows.size
        self.notes.append([call.site, NOTE.format(demand.span.count, size, of_keys.span.count)])
        return self.windows.emit(builder, call, operands, demand.span, of_keys.span, demands.anchor.least)

    def _field(self, emit: Callable, new: Callable, value: relax.TupleGetItem, demand: Demand) -> relax.Expr:
        """Rows of a field of a tuple, of which other fields may have more."""
        field = emit(relax.TupleGetItem(new(value.tuple_value), value.index))
        known = self.demands.of.get(value.tuple_value)
        return self._of_whole(emit, field, demand) if known is None else _part(emit, field, known, demand.span)

    def _rows(self, emit: Callable, new: Callable, x, demand: Demand) -> relax.Expr:
        """Rows of a value, which is whole or computed for these and maybe others."""
        key = x, demand.place, demand.span
        if key not in self.taken:
            known = self.demands.of.get(x) if isinstance(x, relax.Var) else None
            if known is not None:
                self.taken[key] = _part(emit, new(x), known, demand.span)
            else:
                whole = Demand(demand.place, self.spans[x, demand.place])
                first = (x, whole.place, whole.span)
                if first not in self.taken:
                    value = x if isinstance(x, GenericConst) else new(x)
                    self.taken[first] = self._of_whole(emit, value, whole)
                self.taken[key] = _part(emit, self.taken[first], whole, demand.span)
        return self.taken[key]

    def _of_whole(self, emit: Callable, value, demand: Demand) -> relax.Expr:
        span, size, anchor = demand.span, demand.place.rows.size, self.demands.anchor
        if anchor.expr is None:
            return _taken(emit, value, demand.place, np.arange(span.start, span.stop))
        if span not in self.numbers:
            base = emit(op.astype(emit(op.reshape(self._early(emit, anchor.expr), (1,))), "int64"))
            self.numbers[span] = emit(op.add(base, relax.const(np.arange(span.start, span.stop), "int64")))
        selection = Selection(size, span.count, None, self.numbers[span])
        return RowTaker(selection, emit, lambda expr: expr, are_inside=True).taken(value, demand.place)

    def _early(self, emit: Callable, expr):
        """An expression that may be bound later in the old program, computed from the parameters."""
        if not isinstance(expr, relax.Var) or expr not in self.bindings.values:
            return expr
        if expr not in self.early:
            inner = {var: self._early(emit, var) for var in self.bindings.reads[expr]}
            self.early[expr] = emit(substitute(self.bindings.values[expr], inner))
        return self.early[expr]


def _part(emit: Callable, x, known: Demand, span: Span) -> relax.Expr:
    """The rows of `span` of a value that has those of a demand."""
    if span == known.span:
        return x
    digit = known.place.rows
    place = Place(Digit(digit.axis, known.span.count, digit.outer))
    first = span.start - known.span.start
    return _taken(emit, x, place, np.arange(first, first + span.count))


def _taken(emit: Callable, x, place: Place, rows: np.ndarray) -> relax.Expr:
    return RowTaker(Selection(place.rows.size, len(rows), rows, None), emit, lambda expr: expr).taken(x, place)
