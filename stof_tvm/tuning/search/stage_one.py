"""Stage 1 of the search (paper, §3): where the borders between segments lie.

The search starts from the analytical scheme and makes three kinds of moves: expand, seize and compete.  A move is
judged by the segments that it changes: their times before and after are added up.  A segment's time is the best of a
few measured configurations, or that of the first one if that already shows that the move loses.  A faster scheme is
kept, and the search goes on with its moves (depth first); any other is rolled back.  Layers of equal structure stay
equal: a move is judged once for all of them, and made in all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from relax_passes.fusion.operators import Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.moves import compete, expand, seize

MOVES = {"expand": expand, "seize": seize, "compete": compete}
HOPELESS = 1.5  # a move that is predicted to slow its segments down by this factor or more is not measured
# A move whose first configurations are slower by this factor gets no more of them.  On an H200 the first configuration
# of a product with its norm took 1.08 times the best one's time in one of ten cases and 1.20 times at worst (of 38).
# The segments that it is compared with get faster with more configurations, too.
LOST = 1.15


@dataclass(frozen=True)
class Step:
    """One measured move: its kind, its segments' microseconds before and after, in one layer, and whether it was kept.

    `scheme` is the scheme after the move, in hexadecimal.
    """

    move: str
    scheme: str
    before_us: float
    after_us: float
    kept: bool


class StageOne:
    """Searches the schemes of a graph.

    Parameters
    ----------
    operators : sequence of Operator
    structure : callable
        Maps a segment, the range of its operators, to a value that is equal for segments which compute the same.
    predict : callable
        Maps a segment to its predicted microseconds.
    measure : callable
        Called with a list of segments and a number of configurations to measure of each; returns the best microseconds
        of each segment, None for one that cannot run.
    samples : int
        How many configurations of a segment are measured to judge a move.
    least_gain : float
        The share of its segments' time that a move must save to be kept; a smaller gain may be noise.

    Attributes
    ----------
    history : list of Step
        Every move that was measured, in order.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        structure: Callable,
        predict: Callable,
        measure: Callable,
        samples: int = 4,
        least_gain: float = 0.01,
    ):
        self.operators, self.samples, self.least_gain = operators, samples, least_gain
        self.structure, self.predict, self.measure = structure, predict, measure
        self.history = []

    def run(self, scheme: FusionScheme, max_moves: int, is_over: Callable[[], bool] = lambda: False) -> FusionScheme:
        """The best scheme found with at most `max_moves` measured moves, or until `is_over()`."""
        judged = set()
        while True:
            worth = [equal_moves for equal_moves in self._moves(scheme) if self._key(equal_moves) not in judged]
            worth = [equal_moves for equal_moves in worth if not self._is_hopeless(*equal_moves[0][1:])]
            worth = worth[: max_moves - len(self.history)]
            # Measured together, so that all segments compile in parallel; the calls below find the times known.
            segments = lambda: [segment for (_, old, new), *_ in worth for segment in (*old, *new)]
            self.measure(segments(), 1)
            worth = [equal_moves for equal_moves in worth if not self._is_lost(scheme, equal_moves, judged)]
            self.measure(segments(), self.samples)
            for equal_moves in worth:
                if is_over():
                    return scheme
                judged.add(self._key(equal_moves))
                if self._is_faster(scheme, equal_moves):
                    scheme = _applied(scheme, equal_moves)
                    break
            else:
                return scheme

    def _moves(self, scheme) -> list[list[tuple[str, list[range], list[range]]]]:
        """Legal moves from a scheme as (name, segments before, segments after); a list for each set of equal moves."""
        alike = {}
        for name, moves in MOVES.items():
            for candidate in moves(scheme, self.operators):
                old, new = changed(scheme, candidate)
                alike.setdefault((self._structures(old), self._structures(new)), []).append((name, old, new))
        return list(alike.values())

    def _key(self, equal_moves) -> tuple:
        _, old, new = equal_moves[0]
        return self._structures(old), self._structures(new)

    def _structures(self, segments: list[range]) -> tuple:
        return tuple(map(self.structure, segments))

    def _is_hopeless(self, old: list[range], new: list[range]) -> bool:
        return sum(map(self.predict, new)) > HOPELESS * sum(map(self.predict, old))

    def _is_lost(self, scheme: FusionScheme, equal_moves, judged: set) -> bool:
        """Whether one configuration of each segment already shows that the move loses."""
        _, old, new = equal_moves[0]
        times = self.measure([*old, *new], 1)
        if None in times or sum(times[len(old) :]) <= LOST * sum(times[: len(old)]):
            return False
        judged.add(self._key(equal_moves))
        self._judge(scheme, equal_moves, times)
        return True

    def _is_faster(self, scheme: FusionScheme, equal_moves) -> bool:
        _, old, new = equal_moves[0]
        times = self.measure([*old, *new], self.samples)
        return None not in times and self._judge(scheme, equal_moves, times)

    def _judge(self, scheme: FusionScheme, equal_moves, times: list[float]) -> bool:
        """Whether to keep a move, by the times of its segments before and after; noted in the history."""
        move, old, _ = equal_moves[0]
        before_us, after_us = sum(times[: len(old)]), sum(times[len(old) :])
        kept = after_us < (1 - self.least_gain) * before_us
        self.history.append(Step(move, _applied(scheme, equal_moves).hex, before_us, after_us, kept))
        return kept


def changed(scheme: FusionScheme, candidate: FusionScheme) -> tuple[list[range], list[range]]:
    """The segments that only `scheme` has, and those that only `candidate` has, in order."""
    old, new = set(scheme.segments), set(candidate.segments)
    start = attrgetter("start")
    return sorted(old - new, key=start), sorted(new - old, key=start)


def _applied(scheme: FusionScheme, equal_moves) -> FusionScheme:
    """The scheme after a move in all layers where it fits; no check is needed, since a segment is legal by itself."""
    segments = set(scheme.segments)
    for _, old, new in equal_moves:
        if segments.issuperset(old):
            segments = segments.difference(old).union(new)
    return FusionScheme.from_segments(segments)
