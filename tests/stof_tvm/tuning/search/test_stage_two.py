"""Stage 2 with times that are made up."""

import time
from concurrent.futures import Future

import pytest
from tvm import te

from stof_tvm.tuning.search import cost_model
from stof_tvm.tuning.search.contexts import rules_context
from stof_tvm.tuning.search.reward import Reward
from stof_tvm.tuning.search.searched_model import SearchedModel
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.task import fusion_task, schedule_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM, ROWS, FakeMeasurer, made_up_us
from tir_kernels.tuning.decisions import decisions_key, decisions_of


class Log:
    target = CUDA


@pytest.fixture(scope="module")
def tasks():
    return [(fusion_task(GEMM, CUDA), 12), (fusion_task(ROWS, CUDA), 24)]


def tuned(tasks, trials, deadline=None, us=made_up_us, **options):
    """The search after stage 2."""
    search = Search(Log(), FakeMeasurer(us), Options(**options), seed=5, max_trials=trials)
    search.model = SearchedModel.of(tasks)
    search.tune(tasks, deadline)
    return search


def test_the_model_gets_faster(tasks):
    history = tuned(tasks, 60).trials
    assert len(history) == 60 and [trial.number for trial in history] == list(range(1, 61))
    latencies = [trial.model_us for trial in history if trial.model_us is not None]
    assert history[0].model_us is None  # one of two kernels has no time yet
    assert latencies == sorted(latencies, reverse=True) and latencies[-1] < latencies[0]


def test_as_many_are_under_way_as_keep_all_processes_busy(tasks):
    started, most = [], []

    class Watching(FakeMeasurer):
        def submit(self, task, schedule):
            started.append(task)
            return super().submit(task, schedule)

        def wait(self, futures):
            most.append(len(started))
            del started[: len(futures)]
            return super().wait(futures)

    search = Search(Log(), Watching(), Options(), 5, 30)
    search.model = SearchedModel.of(tasks)
    search.tune(tasks, None)
    assert max(most) == 1.5 * Watching.parallel


def test_a_seed_decides_everything(tasks):
    one, other = tuned(tasks, 40), tuned(tasks, 40)
    assert one.measurer.measured == other.measurer.measured
    assert [t.us for t in one.trials] == [t.us for t in other.trials]


def test_the_limit_of_trials_is_exact(tasks):
    assert len(tuned(tasks, 7).trials) == 7


def test_nothing_begins_after_the_deadline(tasks):
    assert tuned(tasks, 40, deadline=time.perf_counter() - 1).trials == []


def test_it_ends_with_the_spaces(tasks):
    rows = tasks[1:]
    search = tuned(rows, 1000)
    assert len(search.trials) == sum(len(space.configs) for space in rows[0][0].spaces)


def test_failures_are_counted_by_reason_and_do_not_end_it(tasks):
    search = tuned(tasks, 30, us=lambda made: None if made.get("stages", 4) > 4 else made_up_us(made))
    state = search.states[tasks[0][0].key]
    assert state.failures.get("made up", 0) > 0 and state.best_us is not None


class Uniform:
    def shares(self, segments):
        return [1.0] * len(segments)


@pytest.mark.parametrize("reward", [Reward, Uniform])
@pytest.mark.parametrize("cost_model", [True, False])
def test_any_reward_runs_with_and_without_a_cost_model(tasks, reward, cost_model):
    assert len(tuned(tasks, 16, reward=reward, cost_model=cost_model).trials) == 16


def test_a_task_that_metaschedule_refuses_is_left_out(tasks, monkeypatch):
    def refuse(self, state):
        if state.task is tasks[0][0]:
            raise RuntimeError("no rule for this")
        return context(self, state)

    context = Search._context
    monkeypatch.setattr(Search, "_context", refuse)
    search = tuned(tasks, 10)
    assert search.states[tasks[0][0].key].failures == {"RuntimeError: no rule for this": 1}
    assert search.trials and {trial.task for trial in search.trials} == {tasks[1][0].name}


class Pending(FakeMeasurer):
    """Trials end when they are waited for."""

    def submit(self, task, schedule):
        super().submit(task, schedule)
        return Future()


@pytest.mark.parametrize("measurer", [Pending, FakeMeasurer])
def test_candidates_are_ranked_while_something_is_waited_for(tasks, measurer, monkeypatch):
    search = Search(Log(), measurer(), Options(), 5, 30)
    search.begin(task for task, _ in tasks)
    before = search.deciding.seconds
    search.rank_ahead()
    assert set(search.cost_model.tables) == {(task.key, space.name) for task, _ in tasks for space in task.spaces}
    # It took no time from a search that has to wait afterwards anyway.
    assert (search.deciding.seconds == before) == (measurer is Pending)

    def again(*_):
        raise AssertionError("predicted a second time")

    monkeypatch.setattr(cost_model, "_features", again)
    search.state(tasks[0][0]).sampler.propose(3)


def test_random_traces_of_a_small_space_are_measured_once_each():
    """A sum of 8 numbers has few schedules."""
    numbers = te.placeholder((8,), "float16")
    task = schedule_task(te.create_prim_func([numbers, te.compute((8,), lambda i: numbers[i] + numbers[i])]), "sum")
    context = rules_context(task, CUDA, 0)
    keys = []
    while candidates := context.candidates():
        keys += [decisions_key(decisions_of(candidate.sch.trace)) for candidate in candidates]
    assert 1 < len(keys) == len(set(keys))
