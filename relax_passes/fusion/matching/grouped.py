"""Segments that are a grouped product: sorted rows times the weight of each row's group."""

from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.ir.operators.grouped_products import problem_of_call
from tir_kernels.errors import StofError


def match_grouped(graph: OperatorGraph) -> SegmentMatch:
    """The product alone.  Raises NoProblem with the reason where other operators are beside it."""
    if len(graph.operators) != 1:
        others = sorted({operator.name for operator in graph.operators if not operator.name.startswith("grouped_")})
        raise NoProblem(f"a grouped product beside {' and '.join(others) or 'another'}")
    (var,) = graph.variables
    call = graph.bindings.values[var]
    try:
        problem = problem_of_call(call)
    except StofError as error:
        raise NoProblem(str(error)) from None
    return SegmentMatch(problem, tuple(call.args), (var,))
