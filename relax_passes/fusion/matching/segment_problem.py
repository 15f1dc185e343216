"""The matching of a segment with a problem of the kernel templates."""

from collections.abc import Callable

from tvm import relax

from relax_passes.fusion.matching.chain import Chain
from relax_passes.fusion.matching.embedding import Embedding
from relax_passes.fusion.matching.group import match_group
from relax_passes.fusion.matching.grouped import match_grouped
from relax_passes.fusion.matching.rotary import match_rotary
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.matching.sorting import match_sorting
from relax_passes.fusion.operators import MI, OperatorGraph
from relax_passes.ir.operators.grouped_products import GROUPED
from relax_passes.ir.operators.sorting import SORTING

__all__ = ["NoProblem", "SegmentMatch", "match_problem"]


# (operators, matcher): a segment goes to the first matcher whose operators it has.
MATCHERS: tuple[tuple[set[str], Callable[[OperatorGraph], SegmentMatch]], ...] = (
    ({"take"}, lambda graph: Embedding(graph).match()),
    ({"concat", "negative"}, match_rotary),
    *(({name}, match_grouped) for name in GROUPED),
    *(({name}, match_sorting) for name in SORTING),
    (set(), lambda graph: Chain(graph).match()),
)


def match_problem(function: relax.Function) -> SegmentMatch:
    """The problem that a segment's function computes.  Raises NoProblem with the reason where it computes none.

    A segment of memory-intensive operators that no kernel of its own computes is an elementwise group.  So is one whose
    kernel would need copies around it, because a group reads and writes through views.
    """
    graph = OperatorGraph(function)
    if not _may_be_group(graph):
        return match_specific(graph)
    try:
        match = match_specific(graph)
    except NoProblem as reason:
        try:
            return match_group(graph)
        except NoProblem as other:
            raise NoProblem(f"{reason}; {other}") from None
    if not _copies(graph, match):
        return match
    try:
        return match_group(graph)
    except NoProblem:
        return match


def match_as_group(function: relax.Function) -> SegmentMatch:
    """The elementwise group that a segment computes, whatever else it may be.  Raises NoProblem where it is none."""
    graph = OperatorGraph(function)
    if not _may_be_group(graph):
        raise NoProblem("it holds operators that are not memory-intensive")
    return match_group(graph)


def _may_be_group(graph: OperatorGraph) -> bool:
    return bool(graph.operators) and all(operator.kind == MI for operator in graph.operators)


def match_specific(graph: OperatorGraph) -> SegmentMatch:
    """The problem among those of kernels for certain operators; NoProblem with the reason where there is none."""
    names = {operator.name for operator in graph.operators}
    return next(match for needed, match in MATCHERS if needed <= names)(graph)


def _copies(graph: OperatorGraph, match: SegmentMatch) -> bool:
    """Whether data moves between the segment's operands or results and the kernel's."""
    moved = [expr for expr in match.inputs if isinstance(expr, relax.Var) and graph.moves_data(expr)]
    return bool(moved) or any(graph.moves_data(var) for var in graph.bindings.outputs)
