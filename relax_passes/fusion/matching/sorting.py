"""Segments that sort rows: one operator of this project, which a kernel computes."""

from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.ir.operators.sorting import SORTING, problem_of_sorting


def match_sorting(graph: OperatorGraph) -> SegmentMatch:
    """The operator alone, whose outputs are one tuple.  Raises NoProblem where other operators are beside it."""
    if len(graph.operators) != 1:
        others = sorted({operator.name for operator in graph.operators if operator.name not in SORTING})
        raise NoProblem(f"a sort beside {' and '.join(others) or 'another'}")
    (var,) = graph.variables
    call = graph.bindings.values[var]
    return SegmentMatch(problem_of_sorting(call), tuple(call.args), (var,))
