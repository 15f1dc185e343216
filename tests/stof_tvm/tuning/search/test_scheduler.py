"""The scheduler draws segments by their rewards."""

from collections import Counter

from stof_tvm.tuning.search.reward import Reward
from stof_tvm.tuning.search.scheduler import Scheduler


class Uniform:
    def shares(self, segments):
        return [1.0] * len(segments)


def test_every_segment_is_tried_before_any_again():
    scheduler = Scheduler(Reward(), [1, 1, 1])
    first = []
    for _ in range(3):
        first.append(scheduler.next_segment())
        scheduler.add_round(first[-1], [10.0])
    assert sorted(first) == [0, 1, 2]


def test_the_slow_segment_gets_most_rounds():
    scheduler = Scheduler(Reward(), [1, 1])
    drawn = Counter()
    for _ in range(200):
        segment = scheduler.next_segment()
        drawn[segment] += 1
        scheduler.add_round(segment, [100.0 if segment == 1 else 1.0])
    assert drawn[1] > 3 * drawn[0] > 0


def test_rounds_side_by_side_spread():
    scheduler = Scheduler(Uniform(), [1] * 8)
    assert len({scheduler.next_segment() for _ in range(8)}) > 4


def test_finished_segments_are_left_out():
    scheduler = Scheduler(Uniform(), [1, 1])
    scheduler.finish(0)
    assert {scheduler.next_segment() for _ in range(20)} == {1}
    scheduler.finish(1)
    assert scheduler.next_segment() is None


def test_a_seed_decides_everything():
    draw = lambda seed: [Scheduler(Uniform(), [1] * 5, seed).next_segment() for _ in range(1)]
    one, other = Scheduler(Uniform(), [1] * 5, 7), Scheduler(Uniform(), [1] * 5, 7)
    assert [one.next_segment() for _ in range(20)] == [other.next_segment() for _ in range(20)]
    assert len({tuple(draw(seed)) for seed in range(20)}) > 1
