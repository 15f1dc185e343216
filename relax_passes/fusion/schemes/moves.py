"""The moves of the scheme search (paper, §3, stage 1): each gives the legal schemes that one step of its kind reaches.

    expand    two neighbouring segments become one
    seize     a segment with a compute-intensive operator takes the nearest operator of a neighbour without one
    compete   a contested operator goes to that one of two segments that has a single compute-intensive operator

The operators that change segments are memory-intensive and lie at a border of their segment.  No move changes an
attention, which is always a segment by itself.  Measurements decide what a move gains; the search rolls back a move
that loses.
"""

from collections.abc import Sequence

from relax_passes.fusion.operators import CI, MI, Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, is_legal


def expand(scheme: FusionScheme, operators: Sequence[Operator]) -> list[FusionScheme]:
    """Every legal scheme in which two neighbouring segments are merged."""
    lengths = _lengths(scheme)
    merged = (lengths[:i] + [lengths[i] + lengths[i + 1]] + lengths[i + 2 :] for i in range(len(lengths) - 1))
    return _legal(merged, operators)


def seize(scheme: FusionScheme, operators: Sequence[Operator]) -> list[FusionScheme]:
    """Every legal scheme in which a segment with CI takes the nearest operator of a neighbour of MI operators only.

    The neighbour keeps at least one operator; taking all of it is `expand`.
    """
    segments = scheme.segments
    candidates = []
    for left in range(len(segments) - 1):
        for taker, giver in ((left, left + 1), (left + 1, left)):
            only_mi = all(operators[i].kind == MI for i in segments[giver])
            if only_mi and len(segments[giver]) > 1 and _count_ci(segments[taker], operators):
                candidates.append(_move_one(scheme, giver, taker))
    return _legal(candidates, operators)


def compete(scheme: FusionScheme, operators: Sequence[Operator]) -> list[FusionScheme]:
    """Every legal scheme in which a contested operator goes to the one of two segments that has a single CI operator.

    An MI operator is contested if it is a segment by itself between two segments with CI, or if it belongs to a segment
    with two CI and lies at the border to a segment with a single CI.
    """
    segments = scheme.segments
    count = [_count_ci(segment, operators) for segment in segments]
    lengths = _lengths(scheme)
    candidates = []
    for middle in range(1, len(segments) - 1):
        alone = len(segments[middle]) == 1 and operators[segments[middle].start].kind == MI
        if alone and count[middle - 1] and count[middle + 1]:
            if count[middle - 1] == 1:
                candidates.append([*lengths[: middle - 1], lengths[middle - 1] + 1, *lengths[middle + 1 :]])
            if count[middle + 1] == 1:
                candidates.append([*lengths[:middle], lengths[middle + 1] + 1, *lengths[middle + 2 :]])
    for left in range(len(segments) - 1):
        for winner, loser in ((left, left + 1), (left + 1, left)):
            border = segments[loser][0 if loser > winner else -1]
            if count[winner] == 1 and count[loser] == 2 and operators[border].kind == MI:
                candidates.append(_move_one(scheme, loser, winner))
    return _legal(candidates, operators)


def _lengths(scheme) -> list[int]:
    return [len(segment) for segment in scheme.segments]


def _count_ci(segment, operators) -> int:
    return sum(operators[i].kind == CI for i in segment)


def _move_one(scheme, giver: int, taker: int) -> list[int]:
    """The lengths after one operator has changed sides between two neighbours."""
    lengths = _lengths(scheme)
    lengths[giver] -= 1
    lengths[taker] += 1
    return lengths


def _legal(candidates, operators) -> list[FusionScheme]:
    schemes = dict.fromkeys(FusionScheme.from_lengths(lengths) for lengths in candidates)
    return [scheme for scheme in schemes if is_legal(scheme, operators)]
