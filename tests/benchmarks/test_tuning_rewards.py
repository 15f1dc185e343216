"""The rewards that this project's is compared with."""

from benchmarks.tuning.rewards import PERIOD, PublishedReward, Uniform
from stof_tvm.tuning.search.reward import Progress


def test_the_published_rule_doubles_the_weight_of_the_one_with_most_new_bests():
    reward = PublishedReward()
    segments = [Progress(1), Progress(1)]
    assert reward.shares(segments) == [1.0, 1.0]
    segments[1].add_round([9.0, 8.0, 7.0, 7.5][:PERIOD])
    assert reward.shares(segments) == [1.0, 2.0**2]
    assert reward.shares(segments) == [1.0, 2.0**2]


def test_uniform_shares():
    assert Uniform().shares([Progress(1), Progress(7)]) == [1.0, 1.0]
