"""The cost model: the analytical one at first, corrected by records."""

import numpy as np
import pytest

from stof_tvm.tuning.search.cost_model import MIN_RECORDS, CostModel
from stof_tvm.tuning.task import fusion_task
from tests.stof_tvm.tuning.fakes import CUDA, GEMM
from tir_kernels.fusion.problem import GemmProblem


@pytest.fixture(scope="module")
def task():
    return fusion_task(GEMM, CUDA)


def space_of(task):
    return next(space for space in task.spaces if space.template.NAME == "gemm")


def true_us(space, config, task) -> float:
    return task.predict(space, config) * (3.0 if config.stages > 4 else 1.0)


def test_without_records_it_is_the_analytical_model(task):
    space = space_of(task)
    times = CostModel().predict(task, space)
    assert times[:50] == pytest.approx([task.predict(space, c) for c in space.configs[:50]], rel=1e-4)


def test_it_learns_what_the_analytical_model_does_not_know(task):
    space, model = space_of(task), CostModel()
    for config in space.configs[:: len(space.configs) // 60]:
        model.learn(task, space, config, true_us(space, config, task))
    times = model.predict(task, space)
    truth = np.array([true_us(space, config, task) for config in space.configs])
    analytical = np.array([task.predict(space, config) for config in space.configs])
    assert spread(times, truth) < 0.5 * spread(analytical, truth)


def test_what_one_task_taught_holds_for_another(task):
    space, model = space_of(task), CostModel()
    for config in space.configs[:: len(space.configs) // 60]:
        model.learn(task, space, config, true_us(space, config, task))
    other = fusion_task(GemmProblem(256, 1024, "float16", (), k=512), CUDA)
    space = space_of(other)
    truth = np.array([true_us(space, config, other) for config in space.configs])
    analytical = np.array([other.predict(space, config) for config in space.configs])
    assert spread(model.predict(other, space), truth) < 0.7 * spread(analytical, truth)


def test_few_records_change_nothing(task):
    space, model = space_of(task), CostModel()
    before = model.predict(task, space)
    for config in space.configs[: MIN_RECORDS - 1]:
        model.learn(task, space, config, 1000.0)
    assert (model.predict(task, space) == before).all()


def spread(times, truth) -> float:
    """Standard deviation of log(predicted / true time): the error that spoils a ranking."""
    return float(np.std(np.log(times / truth)))
