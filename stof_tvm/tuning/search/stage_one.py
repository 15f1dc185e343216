"""Stage 1 of the search (paper, §3): where the borders between segments lie.

From the analytical scheme, moves by expand, seize and compete.  A move is judged by the segments that it changes: the
sum of their times before and after, each the best of a few settings that are measured; of one, where that is enough to
see that the move loses.  What is faster is kept, all else is rolled back.  The search goes depth first: from a scheme
that is kept it goes on with that scheme's own moves.  A move is judged once for all places of the same structure, and
made in all of them: equal layers stay equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_passes.fusion.operators import Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.moves import compete, expand, seize

MOVES = {"expand": expand, "seize": seize, "compete": compete}
HOPELESS = 1.5  # a move that is predicted to slow its segments down by more is not measured
# Nor are more settings than one, where that is slower by more: on an H200 the first setting of a product with its norm
# took 1.08 times the best in one of ten cases, 1.20 times at worst of 38, and what it is compared with gets faster too.
LOST = 1.15


@dataclass(frozen=True)
class Step:
    """One measured move: which, the segments' microseconds before and after at one place, and whether it was kept.

    `scheme` is the scheme that it led to, in hexadecimal.
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
        From the operators of a segment, a range, to something equal for segments that compute the same.
    predict : callable
        From the operators of a segment to predicted microseconds.
    measure : callable
        From several ranges, and a number of settings, to the best microseconds of each; None for one that cannot run.
    settings : int
        By which a move is judged.
    least_gain : float
        Share of the segments' time that a move must save to be kept: less may be noise.

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
        settings: int = 4,
        least_gain: float = 0.01,
    ):
        self.operators, self.settings, self.least_gain = operators, settings, least_gain
        self.structure, self.predict, self.measure = structure, predict, measure
        self.history = []

    def run(self, scheme: FusionScheme, max_moves: int, is_over: Callable[[], bool] = lambda: False) -> FusionScheme:
        """The best scheme found with at most `max_moves` measured moves, or until `is_over()`."""
        judged = set()
        while True:
            worth = [places for places in self._moves(scheme) if self._key(places) not in judged]
            worth = [places for places in worth if not self._is_hopeless(*places[0][1:])]
            worth = worth[: max_moves - len(self.history)]
            # All that they change is measured together, so that it is compiled together; below, the times are known.
            runs = lambda: [run for (_, old, new), *_ in worth for run in (*old, *new)]
            self.measure(runs(), 1)
            worth = [places for places in worth if not self._is_lost(scheme, places, judged)]
            self.measure(runs(), self.settings)
            for places in worth:
                if is_over():
                    return scheme
                judged.add(self._key(places))
                if self._is_faster(scheme, places):
                    scheme = _applied(scheme, places)
                    break
            else:
                return scheme

    def _moves(self, scheme) -> list[list[tuple[str, list[range], list[range]]]]:
        """Legal moves from a scheme, as (name, segments before, segments after); those that do the same, together."""
        alike = {}
        for name, moves in MOVES.items():
            for candidate in moves(scheme, self.operators):
                old, new = changed(scheme, candidate)
                alike.setdefault((self._structures(old), self._structures(new)), []).append((name, old, new))
        return list(alike.values())

    def _key(self, places) -> tuple:
        _, old, new = places[0]
        return self._structures(old), self._structures(new)

    def _structures(self, runs: list[range]) -> tuple:
        return tuple(self.structure(run) for run in runs)

    def _is_hopeless(self, old: list[range], new: list[range]) -> bool:
        return sum(map(self.predict, new)) > HOPELESS * sum(map(self.predict, old))

    def _is_lost(self, scheme: FusionScheme, places, judged: set) -> bool:
        """Whether one setting of each segment says that more are not worth it."""
        _, old, new = places[0]
        times = self.measure([*old, *new], 1)
        if None in times or sum(times[len(old) :]) <= LOST * sum(times[: len(old)]):
            return False
        judged.add(self._key(places))
        self._judge(scheme, places, times)
        return True

    def _is_faster(self, scheme: FusionScheme, places) -> bool:
        _, old, new = places[0]
        times = self.measure([*old, *new], self.settings)
        return None not in times and self._judge(scheme, places, times)

    def _judge(self, scheme: FusionScheme, places, times: list[float]) -> bool:
        """Whether the times before and after say that a move is to be kept, for the history too."""
        move, old, _ = places[0]
        before_us, after_us = sum(times[: len(old)]), sum(times[len(old) :])
        kept = after_us < (1 - self.least_gain) * before_us
        self.history.append(Step(move, _applied(scheme, places).hex, before_us, after_us, kept))
        return kept


def changed(scheme: FusionScheme, candidate: FusionScheme) -> tuple[list[range], list[range]]:
    """The segments that only the first has, and those that only the second has, in order."""
    old, new = set(scheme.segments), set(candidate.segments)
    return sorted(old - new, key=lambda run: run.start), sorted(new - old, key=lambda run: run.start)


def _applied(scheme: FusionScheme, places) -> FusionScheme:
    """The scheme after a move in all places that do not overlap; a segment's legality is its own."""
    segments = set(scheme.segments)
    for _, old, new in places:
        if segments.issuperset(old):
            segments = segments.difference(old).union(new)
    return FusionScheme.from_groups(segments)
