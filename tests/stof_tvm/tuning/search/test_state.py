"""What a search begins with: the log's records of its tasks."""

import pytest

from stof_tvm.tuning.logs.record import Record
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM, FakeMeasurer


class Recalling(FakeMeasurer):
    """With a log of two trials of the task's own, and some of others': faster ones, which this search cannot have."""

    def records(self, task) -> list[Record]:
        space, config = task.default
        own = space.decisions_for(config)
        slower = space.decisions_for(space.configs[-1])
        others = [own | {"template": "cuda mine"}, own | {"stages": 77}, own | {"new_field": 1}]
        timed = [(own, 9.0), (slower, 11.0), *((decisions, 1.0) for decisions in others)]
        return [Record(decisions, us, self.gpu) for decisions, us in timed]


@pytest.fixture(scope="module")
def state():
    return Search(None, Recalling(), Options(), 0, 10).state(fusion_task(GEMM, CUDA))


def test_the_logs_records_count(state):
    assert (state.trials, state.best_us, state.default_us) == (2, 9.0, 9.0)


def test_what_is_recorded_is_not_proposed_again(state):
    space, config = state.task.default
    proposed = state.sampler.propose(len(state.sampler.candidates))
    assert len(proposed) == len(state.sampler.candidates) - 2
    assert not {config, space.configs[-1]} & {config for _, config in proposed}
