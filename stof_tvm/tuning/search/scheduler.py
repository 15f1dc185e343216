"""Which segment gets the next round of trials: drawn by the segments' rewards.

This is no `PyTaskScheduler` of TVM 0.27: its `tune` passes one argument too few to the loop in C++, and that loop
builds the batch of one segment and waits for all of it before the next, which leaves most processors idle.
"""

import random

from stof_tvm.tuning.search.reward import Progress, Shares


class Scheduler:
    """Draws segments with probabilities proportional to their rewards; deterministic under a seed.

    Parameters
    ----------
    reward
        Gives the rewards, as `reward.Reward` does.
    weights : list of int
        How often the model runs each segment.
    """

    def __init__(self, reward: Shares, weights: list[int], seed: int = 0):
        self.reward = reward
        self.segments = [Progress(weight) for weight in weights]
        self.finished = set()
        self.granted = [0] * len(weights)  # rounds under way
        self.random = random.Random(seed)

    def next_segment(self) -> int | None:
        """The segment that gets the next round, or None where all are finished.

        The reward of a segment shrinks with its rounds under way, so that simultaneous rounds spread over segments.
        """
        open_ones = [i for i in range(len(self.segments)) if i not in self.finished]
        if not open_ones:
            return None
        shares = self.reward.shares([self.segments[i] for i in open_ones])
        shares = [share / (1 + self.granted[i]) for share, i in zip(shares, open_ones)]
        if not any(shares):
            shares = [1.0] * len(open_ones)
        (chosen,) = self.random.choices(open_ones, shares)
        self.granted[chosen] += 1
        return chosen

    def add_round(self, segment: int, times: list[float | None]) -> None:
        """Count the times of a round that has ended."""
        self.granted[segment] -= 1
        self.segments[segment].add_round(times)

    def finish(self, segment: int) -> None:
        """Grant a segment no more rounds: nothing of it is left to try."""
        self.finished.add(segment)
