"""The measurer: each outcome is logged at once, and what the log has is not measured again."""

import pytest
from tvm.s_tir import Schedule

from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.measuring.measure import Measurer
from stof_tvm.tuning.search.sampler import Sampler, schedule_of
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM, FakeBuilder, FakeRunner

GPU = "a fake"


@pytest.fixture(scope="module")
def task():
    return fusion_task(GEMM, CUDA)


def measurer(folder, builder=None, runner=None, gpu=GPU, **options):
    return Measurer(
        builder or FakeBuilder(), runner or FakeRunner(), TuningLog(folder, CUDA), "cuda", gpu, 2, **options
    )


def candidates(task, count=3) -> list[Schedule]:
    return [schedule_of(task, *x) for x in Sampler(task, None).propose(count)]


def measure(machine, task, schedules):
    return machine.wait([machine.submit(task, schedule) for schedule in schedules])


def test_outcomes_are_in_the_log_at_once(task, tmp_path):
    (outcome,) = measure(measurer(tmp_path), task, candidates(task, 1))
    assert outcome.us == pytest.approx(7.0) and not outcome.is_cached
    (record,) = TuningLog(tmp_path, CUDA).records(task.key)
    assert record.us == pytest.approx(7.0) and record.gpu == GPU


def test_what_is_known_is_not_measured_again(task, tmp_path):
    measure(measurer(tmp_path), task, candidates(task))
    builder = FakeBuilder()
    again = measurer(tmp_path, builder)
    outcomes = measure(again, task, candidates(task, 4))
    assert [outcome.is_cached for outcome in outcomes] == [True, True, True, False] and builder.count == 1


def test_a_record_from_before_a_field_is_known(task, tmp_path):
    """Its decisions are those that say the field's default."""
    measure(measurer(tmp_path), task, candidates(task, 1))
    older = measurer(tmp_path)
    (record,) = older.log.records(task.key)
    whole = dict(record.decisions)
    assert record.decisions.pop("sets") == 1
    outcomes = measure(older, task, candidates(task, 1))
    assert [outcome.is_cached for outcome in outcomes] == [True]
    assert [known.decisions for known in older.records(task)] == [whole]


def test_the_same_candidate_twice_in_a_run_is_built_once(task, tmp_path):
    builder = FakeBuilder()
    (schedule,) = candidates(task, 1)
    measure(measurer(tmp_path, builder), task, [schedule, schedule])
    assert builder.count == 1


def test_another_devices_times_do_not_count(task, tmp_path):
    measure(measurer(tmp_path), task, candidates(task))
    builder = FakeBuilder()
    measure(measurer(tmp_path, builder, gpu="another"), task, candidates(task))
    assert builder.count == 3


def test_without_the_cache_all_is_measured_again(task, tmp_path):
    measure(measurer(tmp_path), task, candidates(task))
    builder = FakeBuilder()
    measure(measurer(tmp_path, builder, use_cache=False), task, candidates(task))
    assert builder.count == 3


@pytest.mark.parametrize(
    ("builder", "runner", "why"),
    [(FakeBuilder("no such register"), None, "no such register"), (None, FakeRunner(reason="wrong numbers"), "wrong")],
)
def test_failures_are_logged_with_their_reason_and_not_tried_again(task, tmp_path, builder, runner, why):
    (outcome,) = measure(measurer(tmp_path, builder, runner), task, candidates(task, 1))
    assert outcome.us is None and why in outcome.reason
    again = FakeBuilder()
    (outcome,) = measure(measurer(tmp_path, again), task, candidates(task, 1))
    assert outcome.us is None and outcome.is_cached and again.count == 0


def test_what_ends_after_the_search_is_not_logged(task, tmp_path):
    machine = measurer(tmp_path)
    machine.is_closed = True
    measure(machine, task, candidates(task, 1))
    assert TuningLog(tmp_path, CUDA).records(task.key) == []
