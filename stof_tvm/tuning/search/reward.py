"""What a segment earns for a round of trials: its share of the next round's.

This project's reward of a segment s after n_s trials, in microseconds of the model a trial:

    r_s = ALPHA * gain_s + (1 - ALPHA) * chance_s
    gain_s   = w_s * (best_s before its last trials - best_s now) / number of these trials
    chance_s = w_s * best_s / n_s

w_s is how often the model runs the segment.  `gain` is what the last WINDOW trials brought.  `chance` is the optimist's
guess that n_s trials more would save as much again as is left, divided by what it takes: it falls with every trial, so
no segment is forgotten, and is larger for those that take the most of the model's time.  The form is that of the
gradient of Ansor's task scheduler (Zheng et al., OSDI 2020, §6.2) without its term for similar tasks.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

ALPHA = 0.5
WINDOW = 8


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


class Shares(Protocol):
    """What a scheduler asks."""

    def shares(self, segments: list[Progress]) -> list[float]:
        """The reward of each segment, not negative."""


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
