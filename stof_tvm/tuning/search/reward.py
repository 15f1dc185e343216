"""What a segment earns for a round of trials: its share of the next round's.

This project's reward of a segment s after n_s trials, in microseconds of the model a trial:

    r_s = ALPHA * gain_s + (1 - ALPHA) * chance_s
    gain_s   = w_s * (best_s before its last trials - best_s now) / number of these trials
    chance_s = w_s * best_s / n_s

w_s is how often the model runs the segment.  `gain` is what the last WINDOW trials brought.  `chance` is the optimist's
guess that n_s trials more would save as much again as is left, divided by what it takes: it falls with every trial, so
no segment is forgotten, and is larger for those that take the most of the model's time.  The form is that of the
gradient of Ansor's task scheduler (Zheng et al., OSDI 2020, §6.2) without its term for similar tasks.

`published` is the rule of the paper's published code: a segment is drawn with a probability proportional to its weight,
and every PERIOD trials the weight of the one with the most new bests is multiplied by 2 to the power of their number.
"""

from collections import deque
from dataclasses import dataclass, field

ALPHA = 0.5
WINDOW = 8
PERIOD = 4
LARGEST_WEIGHT = 2.0**60


@dataclass
class Progress:
    """One segment's trials so far.

    `weight` is how often the model runs it; `best_us` its best time, None before the first.
    """

    weight: int
    best_us: float | None = None
    trials: int = 0
    new_bests: int = 0
    saved: deque = field(default_factory=lambda: deque(maxlen=WINDOW))  # microseconds, of the last trials

    def add_round(self, times: list[float | None]) -> None:
        """Take in the outcomes of a round, None for failures."""
        for us in times:
            before = self.best_us
            if us is not None and (before is None or us < before):
                self.new_bests += before is not None
                self.best_us = us
            self.saved.append(0.0 if before is None or self.best_us is None else before - self.best_us)
        self.trials += len(times)


class Reward:
    """The equation above."""

    def shares(self, segments: list[Progress]) -> list[float]:
        """The reward of each segment, not negative; all that have no time yet come first."""
        if any(segment.trials == 0 for segment in segments):
            return [float(segment.trials == 0) for segment in segments]
        return [self._reward(segment) for segment in segments]

    @staticmethod
    def _reward(segment: Progress) -> float:
        if segment.best_us is None:  # nothing has worked so far
            return 0.0
        gain = sum(segment.saved) / max(len(segment.saved), 1)
        chance = segment.best_us / segment.trials
        return segment.weight * (ALPHA * gain + (1 - ALPHA) * chance)


class PublishedReward:
    """The published code's rule."""

    def __init__(self):
        self.weights = []
        self.counted = []  # new bests of each segment at the last change
        self.changed_at = 0

    def shares(self, segments: list[Progress]) -> list[float]:
        if len(self.weights) != len(segments):
            self.weights, self.counted = [1.0] * len(segments), [0] * len(segments)
        if sum(segment.trials for segment in segments) - self.changed_at >= PERIOD:
            self.changed_at = sum(segment.trials for segment in segments)
            new = [segment.new_bests - before for segment, before in zip(segments, self.counted)]
            self.counted = [segment.new_bests for segment in segments]
            winner = max(range(len(new)), key=new.__getitem__)
            self.weights[winner] = min(self.weights[winner] * 2.0 ** new[winner], LARGEST_WEIGHT)
        return list(self.weights)


class Uniform:
    """No reward: every segment gets the same."""

    def shares(self, segments: list[Progress]) -> list[float]:
        return [1.0] * len(segments)


REWARDS = {"stof": Reward, "published": PublishedReward, "none": Uniform}
