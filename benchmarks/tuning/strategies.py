"""MetaSchedule's strategies on templates' tasks, to compare the sampler with: values of `Options.strategy`."""

import random
from collections.abc import Callable

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.schedule import Trace

from stof_tvm.tuning.search.contexts import BATCH, TaskContext, strategy_with, tune_context
from stof_tvm.tuning.task import Task, choice_of
from tir_kernels.template import config_to_json


def evolutionary(task: Task, target, seed: int, cost_model: Callable, known: list) -> TaskContext:
    """Evolutionary search, and random traces where `cost_model()` gives none."""
    return _template_context(task, target, seed, cost_model(), known)


def replay_trace(task: Task, target, seed: int, cost_model: Callable, known: list) -> TaskContext:
    """Random traces."""
    return _template_context(task, target, seed, None, known)


def _template_context(task: Task, target, seed: int, cost_model, known) -> TaskContext:
    """A template's task with MetaSchedule's evolutionary search, or random traces without a cost model."""

    def designs(schedule: Schedule) -> list[Schedule]:
        copies = [schedule.copy() for _ in task.spaces]
        for space, copy in zip(task.spaces, copies):
            space.schedule(copy)
        return copies

    rules = {"sch_rules": [], "postprocs": [IsLegal(task)], "mutator_probs": {MutateDecision(): 1.0}}
    space = ms.space_generator.ScheduleFn(designs, **rules)
    context = tune_context(task, target, space, strategy_with(cost_model), seed)
    return TaskContext(task, context, BATCH, cost_model, repeats=cost_model is None, known=known)


@derived_object
class IsLegal(PyPostproc):
    """Refuses combinations of decisions that are no configuration of a task's spaces."""

    def __init__(self, task: Task):
        self.task = task

    def _initialize_with_tune_context(self, context) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        template, config = choice_of(self.task, schedule.trace)
        values = config_to_json(config)
        return any(space.template is template and space.config(values) is not None for space in self.task.spaces)

    def clone(self):
        return IsLegal(self.task)


@derived_object
class MutateDecision(PyMutator):
    """Draws one of a trace's decisions anew, for evolution: MetaSchedule's own mutators know tiles and loops only."""

    def _initialize_with_tune_context(self, context) -> None:
        pass

    def apply(self, trace: Trace, seed: int) -> Trace | None:
        decisions = [(x, int(made)) for x, made in trace.decisions.items() if len(x.attrs[0]) > 1]
        if not decisions:
            return None
        drawn = random.Random(seed)
        instruction, made = drawn.choice(decisions)
        others = [i for i in range(len(instruction.attrs[0])) if i != made]
        return trace.with_decision(instruction, drawn.choice(others), True)

    def clone(self):
        return MutateDecision()
