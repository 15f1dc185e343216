"""Which configurations of a task are measured next: the best by the cost model, sometimes a random one instead.

An epsilon-greedy search strategy for MetaSchedule.  Configurations that differ in a single field, neighbours, are about
equally fast, and measuring one says most about the others: so a batch takes one of each neighbourhood before it takes a
second one of any.
"""

import random
from functools import cached_property

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy

from stof_tvm.tuning.search.cost_model import CostModel
from stof_tvm.tuning.task import Task
from tir_kernels.errors import InputError
from tir_kernels.template import config_to_json, template_name
from tir_kernels.tuning.template_space import TemplateSpace, from_decisions

EPSILON = 0.15
APART = 1 << 32  # added to values, so that configurations of different spaces differ in all fields
WORTH_A_TRY = 3.0  # random picks are predicted to take at most this many times the best prediction
Candidate = tuple[TemplateSpace, object]  # a configuration in its space


class Sampler:
    """Proposes the configurations of one task, each once, the default first; deterministic under a seed.

    Parameters
    ----------
    model : CostModel, optional
        Without one, configurations are drawn at random.
    """

    def __init__(self, task: Task, model: CostModel | None, seed: int = 0):
        self.task, self.model = task, model
        self.random = random.Random(f"{seed} {task.key}")
        self.candidates = [(space, config) for space in task.spaces for config in space.configs]
        self.default = None if task.default is None else self.candidates.index(task.default)
        self.is_left = np.ones(len(self.candidates), bool)
        values = [list(config_to_json(config).values()) for _, config in self.candidates]
        width = max(map(len, values))
        spaces = np.repeat(np.arange(len(task.spaces)), [len(space.configs) for space in task.spaces])
        self.values = np.array([row + [0] * (width - len(row)) for row in values]) + APART * spaces[:, np.newaxis]

    @cached_property
    def _positions(self) -> dict[tuple[str, object], int]:
        return {(space.name, config): i for i, (space, config) in enumerate(self.candidates)}

    def recall(self, decisions: dict[str, object], us: float | None) -> bool:
        """Learn a candidate's time from a log, None for a failure, and propose it no more.

        Returns False where the decisions are none of this task's candidates: a log may hold those of other versions, or
        of a user's own templates.
        """
        try:
            template, config = from_decisions(decisions, self.task.templates)
        except InputError:
            return False
        position = self._positions.get((template_name(template), config))
        if position is None:
            return False
        self.is_left[position] = False
        self.learn(template, config, us)
        return True

    def propose(self, count: int) -> list[Candidate]:
        """The next `count` configurations, fewer at the end of the spaces."""
        picked, is_near = [], np.zeros(len(self.candidates), bool)
        if count > 0 and self.default is not None and self.is_left[self.default]:
            self._pick(self.default, picked, is_near)
        if len(picked) < count:
            order, promising = self._ranked()
        while len(picked) < count and self.is_left.any():
            order, promising = (positions[self.is_left[positions]] for positions in (order, promising))
            if len(promising) and self.random.random() < EPSILON:
                best = self.random.choice(promising)
            else:
                apart = order[~is_near[order]]
                best = apart[0] if len(apart) else order[0]
            self._pick(best, picked, is_near)
        return [self.candidates[i] for i in picked]

    def _pick(self, best: int, picked: list[int], is_near: np.ndarray) -> None:
        picked.append(best)
        self.is_left[best] = False
        is_near |= (self.values != self.values[best]).sum(axis=1) <= 1

    def predict(self) -> np.ndarray | None:
        """Microseconds of all candidates; None without a model.  The first call takes long."""
        if self.model is None:
            return None
        return np.concatenate([self.model.predict(self.task, space) for space in self.task.spaces])

    def learn(self, template, config, us: float | None) -> None:
        """Learn the time of one of the task's candidates; None for a failure."""
        space = next((space for space in self.task.spaces if space.template is template), None)
        if self.model is not None and us is not None and space is not None:
            self.model.learn(self.task, space, config, us)

    def _ranked(self) -> tuple[np.ndarray, np.ndarray]:
        """The candidates that are left, the best first, and those of them that are worth a random try."""
        left, times = np.flatnonzero(self.is_left), self.predict()
        if times is None:
            shuffled = np.array(self.random.sample(left.tolist(), len(left)), int)
            return shuffled, shuffled
        order = left[np.argsort(times[left], kind="stable")]
        return order, order[times[order] <= WORTH_A_TRY * times[order[:1]]]


@derived_object
class SamplerStrategy(PySearchStrategy):
    """A sampler for MetaSchedule's tuning contexts."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.remaining = self.batch = 0
        self.proposed = {}  # schedule -> candidate, kept since reading it from the trace is slow

    def _initialize_with_tune_context(self, context) -> None:
        self.arguments = ArgInfo.from_entry_func(context.mod, remove_preproc=True)

    def pre_tuning(self, max_trials, num_trials_per_iter, design_spaces, database=None, cost_model=None) -> None:
        self.remaining, self.batch = max_trials, num_trials_per_iter

    def post_tuning(self) -> None:
        self.remaining = 0

    def generate_measure_candidates(self):
        picked = self.sampler.propose(min(self.batch, self.remaining))
        self.remaining -= len(picked)
        schedules = [schedule_of(self.sampler.task, *x) for x in picked]
        self.proposed.update(zip(schedules, picked))
        return [MeasureCandidate(schedule, self.arguments) for schedule in schedules] or None

    def notify_runner_results(self, measure_candidates, results) -> None:
        for candidate, result in zip(measure_candidates, results):
            seconds = [] if result.run_secs is None else [float(x) for x in result.run_secs]
            us = sum(seconds) / len(seconds) * 1e6 if seconds else None
            space, config = self.proposed.pop(candidate.sch)
            self.sampler.learn(space.template, config, us)

    def clone(self):
        return SamplerStrategy(Sampler(self.sampler.task, self.sampler.model))


def schedule_of(task: Task, space: TemplateSpace | None = None, config=None) -> Schedule:
    """The schedule that chooses a configuration of a space; without a space, the default schedule."""
    if space is None:
        return Schedule(task.mod, debug_mask="none")
    return task.traces[space.template].schedule(config)
