"""Candidates of strategies that draw at random, and may draw the same one again."""

import pytest

from stof_tvm.tuning.search.contexts import DRAWS, TaskContext
from stof_tvm.tuning.search.sampler import schedule_of
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, ROWS


class Candidate:
    def __init__(self, sch):
        self.sch = sch


class Draws:
    """A context of MetaSchedule's that proposes the configurations of these numbers, a list of them a round."""

    def __init__(self, task, rounds):
        self.rounds = iter(rounds)
        self.schedules = [schedule_of(task, space, config) for space in task.spaces for config in space.configs]

    def pre_tuning(self, *arguments, **options):
        pass

    def generate_measure_candidates(self):
        found = next(self.rounds)
        return None if found is None else [Candidate(self.schedules[i]) for i in found]


@pytest.fixture(scope="module")
def task():
    return fusion_task(ROWS, CUDA)


def proposed(task, rounds, repeats):
    draws = Draws(task, rounds)
    context = TaskContext(task, draws, batch=2, repeats=repeats)
    return lambda: [draws.schedules.index(candidate.sch) for candidate in context.candidates()]


def test_rounds_of_repeats_are_drawn_again(task):
    candidates = proposed(task, [[0, 1], [1, 1], [0, 1], [1, 2]], repeats=True)
    assert [candidates(), candidates()] == [[0, 1], [2]]


def test_a_space_in_which_nothing_is_new_is_at_its_end(task):
    candidates = proposed(task, [[0, 0], *[[0, 0]] * DRAWS, [1, 1]], repeats=True)
    assert [candidates(), candidates(), candidates()] == [[0], [], [1]]


def test_a_strategy_that_repeats_nothing_is_taken_at_its_word(task):
    candidates = proposed(task, [[0, 0], None, [1]], repeats=False)
    assert [candidates(), candidates(), candidates()] == [[0, 0], [], [1]]
