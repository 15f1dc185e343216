"""The matching of a segment with a problem of the kernel templates."""

from collections.abc import Callable

from tvm import relax

from relax_passes.fusion.matching.chain import Chain
from relax_passes.fusion.matching.embedding import Embedding
from relax_passes.fusion.matching.rotary import match_rotary
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph

__all__ = ["NoProblem", "SegmentMatch", "match_problem"]


# (operators, matcher): a segment goes to the first matcher whose operators it has.
MATCHERS: tuple[tuple[set[str], Callable[[OperatorGraph], SegmentMatch]], ...] = (
    ({"take"}, lambda graph: Embedding(graph).match()),
    ({"concat", "negative"}, match_rotary),
    (set(), lambda graph: Chain(graph).match()),
)


def match_problem(function: relax.Function) -> SegmentMatch:
    """The problem that a segment's function computes.  Raises NoProblem with the reason where it computes none."""
    graph = OperatorGraph(function)
    names = {operator.name for operator in graph.operators}
    return next(match for needed, match in MATCHERS if needed <= names)(graph)
