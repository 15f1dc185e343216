"""Rewards to compare this project's with: the rule of the paper's published code, and none.

By the published rule a segment is drawn with a probability proportional to its weight, and every PERIOD trials the
weight of the one with the most new bests is multiplied by 2 to the power of their number.
"""

from stof_tvm.tuning.search.reward import Progress

PERIOD = 4
LARGEST_WEIGHT = 2.0**60


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
