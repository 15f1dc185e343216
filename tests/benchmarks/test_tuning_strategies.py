"""MetaSchedule's strategies run over the templates' spaces."""

import pytest

from benchmarks.tuning.strategies import MutateDecision, evolutionary, replay_trace
from stof_tvm.tuning.search.sampler import schedule_of
from stof_tvm.tuning.search.searched_model import SearchedModel
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM, FakeMeasurer
from tir_kernels.tuning.decisions import decisions_of


class Log:
    target = CUDA


@pytest.fixture(scope="module")
def tasks():
    return [(fusion_task(GEMM, CUDA), 12)]


@pytest.mark.parametrize("strategy", [replay_trace, evolutionary])
def test_metaschedules_own_strategies_run_over_the_same_spaces(tasks, strategy):
    search = Search(Log(), FakeMeasurer(), Options(strategy=strategy), seed=5, max_trials=13)
    search.model = SearchedModel.of(tasks[:1])
    search.begin([tasks[0][0]])  # the default, with which each strategy begins
    search.wait()
    search.tune(tasks[:1], None)
    assert len(search.trials) == 13 and search.trials[0].us == search.states[tasks[0][0].key].default_us
    assert len({key for _, key in search.measurer.measured}) > 6


def test_a_mutation_is_another_setting_of_one_decision(tasks):
    task = tasks[0][0]
    trace = schedule_of(task, *task.default).trace
    before = decisions_of(trace)
    for _ in range(30):  # each with another seed; some decisions have one value only and are no choice
        after = decisions_of(MutateDecision().apply(trace))
        assert before.keys() == after.keys() and sum(before[name] != after[name] for name in before) == 1
