"""The sampler: what it proposes, and how fast it comes to what is best."""

import statistics

import pytest

from stof_tvm.tuning.search.cost_model import CostModel
from stof_tvm.tuning.search.sampler import Sampler, schedule_of
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM, ROWS, made_up_us
from tir_kernels.template import config_to_json
from tir_kernels.tuning.decisions import decisions_of
from tir_kernels.tuning.template_space import chosen


@pytest.fixture(scope="module")
def task():
    return fusion_task(GEMM, CUDA)


def us_of(task, candidate) -> float:
    return made_up_us(decisions_of(schedule_of(task, *candidate).trace))


def tuned(task, model, trials, seed=0) -> list[float]:
    """Times in the order of the proposals."""
    sampler, times = Sampler(task, model, seed), []
    while len(times) < trials:
        for space, config in sampler.propose(4):
            times.append(us_of(task, (space, config)))
            sampler.learn(space.template, config, times[-1])
    return times


def test_the_default_comes_first(task):
    assert Sampler(task, CostModel()).propose(3)[0] == task.default


def test_nothing_is_proposed_twice_and_the_end_is_an_end():
    task = fusion_task(ROWS, CUDA)
    sampler = Sampler(task, CostModel())
    proposed = [x for _ in range(20) for x in sampler.propose(4)]
    assert len(proposed) == len(set(proposed)) == sum(len(space.configs) for space in task.spaces)
    assert sampler.propose(4) == []


def test_what_a_log_knows_is_learnt_and_skipped(task):
    first, second, *_ = Sampler(task, CostModel()).propose(2)
    sampler = Sampler(task, CostModel())
    assert sampler.recall(first[0].decisions_for(first[1]), 12.0)
    assert sampler.recall(second[0].decisions_for(second[1]), None)
    assert not {first, second} & set(sampler.propose(len(sampler.candidates)))
    assert [len(records) for records in sampler.model.records.values()] == [1]


@pytest.mark.parametrize("change", [{"template": "cuda none"}, {"stages": 77}, {"new_field": 1}])
def test_what_a_log_knows_of_others_is_not_the_tasks(task, change):
    space, config = task.default
    assert not Sampler(task, CostModel()).recall(space.decisions_for(config) | change, 12.0)


def test_a_batch_spreads_over_the_space(task):
    batch = Sampler(task, CostModel()).propose(4)
    for i, (_, one) in enumerate(batch):
        for _, other in batch[:i]:
            a, b = config_to_json(one), config_to_json(other)
            assert sum(a[name] != b[name] for name in a) > 1


def test_learning_beats_chance(task):
    """Once 40 trials are known, what the model proposes is faster than what comes at random, under each seed.

    The best of so few is luck: over eight seeds it was no better with the model.
    """
    later = lambda model, seed: statistics.mean(tuned(task, model, 80, seed)[40:])
    assert all(later(CostModel(), seed) < later(None, seed) for seed in range(3))


def test_a_seed_decides_everything(task):
    assert tuned(task, CostModel(3), 24, 3) == tuned(task, CostModel(3), 24, 3)
    assert tuned(task, None, 24, 3) != tuned(task, None, 24, 4)


class Forgetful(CostModel):
    """Computes everything anew."""

    def predict(self, task, space):
        self.tables, self.predicted = {}, {}
        return super().predict(task, space)


def test_what_is_remembered_changes_no_choice(task):
    assert tuned(task, CostModel(3), 32, 3) == tuned(task, Forgetful(3), 32, 3)


def test_a_candidate_names_its_configuration(task):
    space, config = Sampler(task, None).propose(2)[1]
    assert chosen(schedule_of(task, space, config).trace) == (space.template, config)
