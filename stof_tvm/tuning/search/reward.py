"""The reward of a segment, which decides how likely it gets the next round of trials.

The reward of segment s after n_s trials, in microseconds of the model's latency per trial; the paper does not give its
own (§3):

    r_s = ALPHA * gain_s + (1 - ALPHA) * chance_s
    gain_s   = w_s * (best_s before its last trials - best_s now) / number of these trials
    chance_s = w_s * best_s / n_s

w_s is how often the model runs the segment.  `gain` is what the last WINDOW trials saved.  `chance` is an optimistic
guess: that another n_s trials would save all of the time that is left.  It falls with every trial of the segment, so no
segment is forgotten, and it is larger for segments that take more of the model's time.  The form is that of the
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
    saved: deque = field(default_factory=lambda: deque(maxlen=WINDOW))  # µs that each of the last trials saved

    def add_round(self, times: list[float | None]) -> None:
        """Count the times of a round, None for failures."""
        for us in times:
            before = self.best_us
            if us is not None and (before is None or us < before):
                self.new_bests += before is not None
                self.best_us = us
            self.saved.append(0.0 if before is None or self.best_us is None else before - self.best_us)
        self.trials += len(times)


class Shares(Protocol):
    """The interface by which a scheduler asks for rewards."""

    def shares(self, segments: list[Progress]) -> list[float]:
        """The reward of each segment, not negative."""


class Reward:
    """The reward of the equation above."""

    def shares(self, segments: list[Progress]) -> list[float]:
        """The reward of each segment, not negative; segments without a trial come first."""
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
