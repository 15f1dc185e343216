"""Which rows of each value are read, where reads of runs of rows, and windows of attentions, leave some out.

    x ── keys, values ── attention ── + ── … ── the last row          the last row
    └─── its queries ────┘   └─── x ──┘            keys within the window before it, and so on, a window more a layer

Demands go from readers to what they read.  A value is computed for the run that holds all rows that are read of it, or
it is whole.  An attention has the queries that are read only where its keys, too, are some only: then its window says
which, and without one nothing changes.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import AttentionCall, match_attention
from relax_passes.ir.bindings import Bindings
from relax_passes.parallel.rules import tensors_of
from relax_passes.read_rows.distances import Anchor
from relax_passes.read_rows.moves import slots_of
from relax_passes.read_rows.places import NotMoved, Place
from relax_passes.read_rows.spans import Run, Span

MOST = 15, 16  # of the rows, in more of which a value is whole
TILE, FEW = 64, 512  # more than a few rows are full tiles of kernels, where there are as many


@dataclass(frozen=True)
class Demand:
    """The rows that are read of a value, which is not read otherwise; `place` is that of all its rows."""

    place: Place
    span: Span


class Demands:
    """The demands of a function's values, counted from one anchor.

    Parameters
    ----------
    mod : tvm.IRModule
    bindings : Bindings
        Of its "main".
    runs : dict of relax.Var to Run
        Reads of runs of rows.
    anchor : Anchor
    closed : collection of relax.Var
        Values that depend on no input; they stay whole.
    window_of : callable
        `AttentionWindows.keys`.

    Attributes
    ----------
    of : dict of relax.Var to Demand
        Of the values that are computed for some rows.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        bindings: Bindings,
        runs: dict[relax.Var, Run],
        anchor: Anchor,
        closed: Collection[relax.Var],
        window_of: Callable[..., Span],
    ):
        self.mod, self.bindings, self.anchor, self._closed = mod, bindings, anchor, closed
        self.runs = {var: run for var, run in runs.items() if run.anchor is anchor}
        self._window_of = window_of
        self._attentions = {var: match_attention(mod, value) for var, value in bindings.values.items()}
        self.of: dict[relax.Var, Demand] = {}
        self._needs: dict[relax.Var, list[Demand | None]] = {}  # of operands, of the values in `of`
        whole: set[relax.Var] = set()
        while True:
            self._find(whole)
            if not (more := {*self._unsparing()}):
                break
            whole |= more

    def attention(self, var) -> AttentionCall | None:
        """The attention that a variable is bound to."""
        return self._attentions[var]

    def operands(self, var) -> list[tuple[relax.Expr, Demand | None]]:
        """The operands of a value in `of`, with the rows that are read of each; None for all."""
        return list(zip(self._operands(var), self._needs[var], strict=True))

    def _operands(self, var) -> list:
        value = self.bindings.values[var]
        if isinstance(value, relax.TupleGetItem):
            return [value.tuple_value]
        return tensors_of(value) if isinstance(value, relax.Call) else []

    def _find(self, whole: set) -> None:
        """Set `of`, with these values whole."""
        self.of, self._needs = {}, {}
        for var in reversed(self.bindings.values):
            if var in whole or var in self._closed or var in self.bindings.outputs:
                continue
            if (demand := self._joined(var)) is not None:
                try:
                    self._needs[var] = self._of_operands(var, demand)
                except NotMoved:
                    continue
                self.of[var] = demand

    def _joined(self, var) -> Demand | None:
        """What the readers of a value read of it; None for all of it, and where most of it is read."""
        found: Demand | None = None
        readers = set(self.bindings.readers[var])
        for demand in (demand for reader in readers for demand in self._of_reader(reader, var)):
            if demand is None or found is not None and demand.place != found.place:
                return None
            found = demand if found is None else Demand(found.place, found.span.joined(demand.span))
        if found is None or (span := self._inside(found)) is None:
            return None
        return Demand(found.place, span)

    def _inside(self, demand: Demand) -> Span | None:
        """The rows of a demand that there are; None where they may lie outside, or are most."""
        size, anchor, span = demand.place.rows.size, self.anchor, demand.span
        if anchor.expr is None:
            span = Span(max(span.start, 0), min(span.stop, size))
        elif anchor.least + span.start < 0 or anchor.most + span.stop > size:
            return None
        if span.count > FEW:
            span = Span(max(span.stop - -(-span.count // TILE) * TILE, -anchor.least), span.stop)
        return span if 0 < span.count and MOST[1] * span.count <= MOST[0] * size else None

    def _of_reader(self, reader, var) -> Iterator[Demand | None]:
        if reader in self.of:
            yield from (demand for x, demand in self.operands(reader) if x.same_as(var))
        elif reader in self.runs and self.runs[reader].source.same_as(var):
            yield Demand(self.runs[reader].place, self.runs[reader].span)
        else:
            yield None

    def _of_operands(self, var, demand: Demand) -> list[Demand | None]:
        """What a value reads of its operands for some rows; NotMoved where it cannot be computed for them alone."""
        value, place, span = self.bindings.values[var], demand.place, demand.span
        if isinstance(value, relax.Tuple):
            raise NotMoved
        if (call := self._attentions[var]) is None:
            slots = slots_of(value, place)
            return [Demand(slot, span) if isinstance(slot, Place) else None for slot in slots]
        keys = self._window_of(call, span, self.anchor.least, lambda keys: self._inside(Demand(place, keys)))
        of_queries, of_keys = Demand(place, span), Demand(place, keys)
        others = [None for x in (call.mask, call.bias, call.sink, call.positions) if x is not None]
        return [of_queries, of_keys, of_keys, *others]

    def _unsparing(self) -> Iterator[relax.Var]:
        """Values in `of` that may as well be whole: attentions whose keys are, and what leads from or to none."""
        leads, feeds = set(), set()
        for var in self.bindings.values:
            if var in self.of:
                if (call := self._attentions[var]) is not None:
                    if not {call.k, call.v} <= {*self.of}:
                        yield var
                    leads.add(var)
                elif any(x in leads for x, demand in self.operands(var) if demand is not None):
                    leads.add(var)
        for var in reversed(self.bindings.values):
            if var in self.of and (var in feeds or self._attentions[var] is not None):
                feeds |= {
                    x for x, demand in self.operands(var) if demand is not None and not isinstance(x, GenericConst)
                }
        yield from (var for var in self.of if var not in leads and var not in feeds)
