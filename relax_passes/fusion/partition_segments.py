"""Partition "main": each segment of a fusion scheme becomes a private function that "main" calls.

Preconditions: after `RewriteMaskedAttention` and the inlining of what stays dense; "main" is one dataflow block of pure
operators; before `LegalizeOps`.  The functions carry `Primitive` and `stof.segment`, the segment's number, and hold the
constants that their operators read.  A segment with several results (a residual stream and its norm) returns a tuple.
Attention stays a call in "main".  The module attribute `stof.fusion_scheme` is the scheme in hexadecimal, and
`stof.segments` a JSON list with the operators of each segment.

Views are copied to their readers.  A view that only renames dimensions stays in "main", where it costs nothing, unless
it lies between two operators of one segment.  A view that moves data goes into a segment of memory-intensive operators:
the one that reads it if possible, else the one that computes its operand, unless that loses its kernel template by one
more result.  Between products and attention it stays in "main".
"""

from collections.abc import Callable

import tvm
from tvm import relax

from relax_passes.fusion.operators import ATTENTION, MI, OperatorGraph
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, check_scheme
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.ir.rebuild import new_main, substitute
from relax_passes.report_rows import SEGMENTS, with_rows
from tir_kernels.report_rows import SegmentRow

SEGMENT = "stof.segment"
SCHEME = "stof.fusion_scheme"


@tvm.transform.module_pass(opt_level=0, name="PartitionSegments")
class PartitionSegments:
    """Cut "main" into the segments of a scheme.

    Parameters
    ----------
    scheme : FusionScheme or callable
        The scheme, or a function from the OperatorGraph of "main" to it.
    has_template : callable, optional
        Whether a kernel template computes a segment's function; by default none computes any.

    Raises SchemeError for a scheme that does not fit the operators.
    """

    def __init__(
        self,
        scheme: FusionScheme | Callable[[OperatorGraph], FusionScheme],
        has_template: Callable[[relax.Function], bool] = lambda function: False,
    ):
        self.scheme = scheme
        self.has_template = has_template

    def transform_module(self, mod, _ctx):
        graph = OperatorGraph(mod["main"])
        scheme = self.scheme if isinstance(self.scheme, FusionScheme) else self.scheme(graph)
        check_scheme(scheme, graph.operators)
        rows = [SegmentRow(i, tuple(_names(graph, segment))) for i, segment in enumerate(scheme.segments)]
        mod = _Partition(mod, graph, scheme, self.has_template).transform()
        return with_rows(mod.with_attr(SCHEME, scheme.hex), SEGMENTS, rows)


class SegmentContents:
    """The contents of one segment: its operators, the views among and before them, and its parameters.

    `inner` and `params` are variables of the partitioned function, in the order of computation.
    """

    def __init__(self, graph: OperatorGraph, segment: range):
        self.graph = graph
        self.segment = segment
        self.inner = {}
        self.params = {}
        self.only_mi = all(graph.operators[i].kind == MI for i in segment)
        for i in segment:
            var = graph.variables[i]
            for source in graph.bindings.reads[var]:
                self.take_in(source)
            self.inner[var] = None

    def take_in(self, var):
        """Make a variable known to the segment: computed inside, or a parameter."""
        if var in self.inner or var in self.params:
            return
        if var in self.graph.closed or self._belongs_inside(var):
            for source in self.graph.bindings.reads[var]:
                self.take_in(source)
            self.inner[var] = None
        else:
            self.params[var] = None

    def _belongs_inside(self, var) -> bool:
        graph = self.graph
        if not graph.is_view(var):
            return False
        is_between = any(graph.index.get(root) in self.segment for root in graph.roots(var) if root in graph.index)
        return is_between or isinstance(var.ty, relax.TupleType) or (self.only_mi and graph.moves_data(var))

    def function(self, results) -> relax.Function:
        """The private function that computes `results`, variables of the segment; more than one make a tuple."""
        builder = relax.BlockBuilder()
        mapping = {var: relax.Var(var.name, var.ty) for var in self.params}
        with closing_blocks(builder), builder.function("segment", list(mapping.values()), private=True):
            with builder.dataflow():
                for var in self.inner:
                    mapping[var] = builder.emit(substitute(self.graph.bindings.values[var], mapping), var.name)
                outputs = [mapping[var] for var in results]
                output = builder.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
            builder.emit_func_output(output)
        return builder.finalize()["segment"]


class _Partition:
    def __init__(self, mod, graph, scheme, has_template):
        self.mod = mod
        self.graph = graph
        self.segments = scheme.segments
        self.has_template = has_template
        self.contents = {}  # number of a segment -> SegmentContents
        self.segment_of = {}  # operator -> number of its segment
        for number, segment in enumerate(self.segments):
            self.segment_of.update(dict.fromkeys(segment, number))
            if graph.operators[segment.start].kind != ATTENTION:
                self.contents[number] = SegmentContents(graph, segment)
        self.results = {number: {} for number in self.contents}  # number -> variables that are read outside segments
        self.carried = {number: [] for number in self.contents}  # the views among these
        self.new = {}  # variable of the old function -> of the new one

    def transform(self):
        graph, function = self.graph, self.graph.function
        outside = [var for contents in self.contents.values() for var in contents.params]
        for var in graph.variables:
            if graph.operators[graph.index[var]].kind == ATTENTION:
                outside += graph.sources(var)
        outside += relax.analysis.free_vars(function.body.body)
        for var in outside:
            self._request(var)
        for number, views in self.carried.items():
            for var in self._too_many(number):
                del self.results[number][var]
                views.remove(var)
                for source in graph.sources(var):
                    self._request(source, carry=False)
        return new_main(self.mod, self._emit)

    def _emit(self, builder):
        function = self.graph.function
        for number, segment in enumerate(self.segments):
            if number in self.contents:
                self._emit_call(builder, number)
            else:
                for i in segment:
                    self._emit_here(builder, self.graph.variables[i])
        for var in relax.analysis.free_vars(function.body.body):
            self._emit_here(builder, var)
        return substitute(function.body.body, self.new)

    def _too_many(self, number: int) -> list[relax.Var]:
        """The views that a segment does not carry, as it has a template with fewer of them, or none, only."""
        views, kept = self.carried[number], list(self.carried[number])
        while kept and not self.has_template(self._function(number, self._results_with(number, kept))):
            kept = kept[: len(kept) // 2]
        if kept or not views or self.has_template(self._function(number, self._results_with(number, []))):
            return views[len(kept) :]
        return []

    def _results_with(self, number: int, views: list) -> dict:
        """The segment's results if it carries only these views: the others are made from their roots."""
        dropped = [var for var in self.carried[number] if var not in views]
        roots = [root for var in dropped for root in self.graph.roots(var)]
        return dict.fromkeys([*(var for var in self.results[number] if var not in dropped), *roots])

    def _function(self, number: int, wanted) -> relax.Function:
        """The segment's function if these are its results."""
        contents = SegmentContents(self.graph, self.segments[number])
        for var in wanted:
            contents.take_in(var)
        return contents.function([var for var in contents.inner if var in wanted])

    def _request(self, var, carry: bool = True):
        """Record that `var` is read outside segments: as a result of its segment, or by the sources of this view."""
        graph = self.graph
        if var in graph.index:
            number = self.segment_of[graph.index[var]]
            if number in self.contents:
                self.results[number][var] = None
        elif carry and (carrier := self._producer_that_carries(var)) is not None:
            if var not in self.results[carrier]:
                self.carried[carrier].append(var)
            self.results[carrier][var] = None
        else:
            for source in graph.sources(var):
                self._request(source, carry)

    def _producer_that_carries(self, var) -> int | None:
        """The number of the segment that computes the view `var`, which is read outside segments, or None.

        Only a view that moves data goes there, and only if all its sources are from one segment of MI operators.
        """
        graph = self.graph
        if isinstance(var.ty, relax.TupleType) or not graph.moves_data(var):
            return None
        numbers = {self.segment_of[graph.index[root]] if root in graph.index else None for root in graph.roots(var)}
        (number,) = numbers if len(numbers) == 1 else (None,)
        return number if number in self.contents and self.contents[number].only_mi else None

    def _emit_call(self, builder, number):
        contents = self.contents[number]
        for var in self.results[number]:
            contents.take_in(var)
        results = [var for var in contents.inner if var in self.results[number]]
        for var in contents.params:
            self._emit_here(builder, var)
        function = contents.function(results).with_attrs({"Primitive": True, SEGMENT: number})
        names = "_".join(_names(self.graph, contents.segment))
        callee = builder.add_func(function, f"segment{number}_{names}")
        call = builder.emit(relax.Call(callee, [self.new.get(var, var) for var in contents.params]))
        for i, var in enumerate(results):
            self.new[var] = call if len(results) == 1 else builder.emit(relax.TupleGetItem(call, i))

    def _emit_here(self, builder, var):
        """Emit a kernel call, a view or an expression of constants in the new "main"."""
        if var in self.new or var not in self.graph.bindings.values:
            return
        for source in self.graph.bindings.reads[var]:
            self._emit_here(builder, source)
        self.new[var] = builder.emit(substitute(self.graph.bindings.values[var], self.new), var.name)


def _names(graph, segment) -> list[str]:
    return [graph.operators[i].name.removeprefix("nn.") for i in segment]
