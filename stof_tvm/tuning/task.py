"""Tuning tasks: a workload and the spaces of its candidates."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.s_tir.schedule import Trace

from stof_tvm.tuning.logs.log import workload_hash
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.problems.registry import kind_of
from tir_kernels.template import Template
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest
from tir_kernels.tuning.template_space import SpaceTraces, TemplateSpace, chosen, fusion_spaces
from tir_kernels.tuning.workload import attention_workload, fusion_workload, primfunc_workload


@dataclass(eq=False)
class Task:
    """A workload to tune; equal workloads are one task.

    Attributes
    ----------
    name : str
        A title for people.
    mod : tvm.IRModule
        The workload.
    spaces : tuple of TemplateSpace
        One for each template that computes the workload; empty where MetaSchedule's own rules make the candidates.
    predict : callable, optional
        Maps a space and one of its configurations to predicted microseconds.
    default : (TemplateSpace, Config), optional
        The choice of a build without logs.
    problem : optional
        The problem that the templates compute.
    mask : Mask, optional
        The mask of an attention; `digest` names it in logs.
    key : str
        The hash of the workload, by which logs know it.
    """

    name: str
    mod: tvm.IRModule
    spaces: tuple[TemplateSpace, ...] = ()
    predict: Callable | None = None
    default: tuple | None = None
    problem: Any = None
    mask: object = None
    digest: str | None = None
    key: str = field(init=False)

    def __post_init__(self):
        self.key = workload_hash(self.mod)

    @functools.cached_property
    def predicted_us(self) -> float | None:
        """Predicted time of the default; None where nothing predicts it."""
        return None if self.default is None or self.predict is None else self.predict(*self.default)

    @property
    def templates(self) -> tuple[Template, ...]:
        """The templates of the spaces."""
        return tuple(space.template for space in self.spaces)

    @functools.cached_property
    def traces(self) -> dict[Template, SpaceTraces]:
        """For each template, the object that makes the schedules of its candidates."""
        return {space.template: SpaceTraces(self.mod, space) for space in self.spaces}


def fusion_task(problem, target: tvm.target.Target, templates: list | None = None) -> Task:
    """The task of a fused segment's problem; `templates` are searched, by default those of the target."""
    spaces = tuple(fusion_spaces(problem, target, templates))
    predict = _remembered(lambda space, config: space.template.predict_us(problem, config, target))
    default = spaces[0], spaces[0].configs[0]
    return Task(kind_of(problem).title(problem), fusion_workload(problem), spaces, predict, default, problem)


def attention_task(problem: AttentionProblem, mask, target: tvm.target.Target) -> Task:
    """The task of an attention with a mask."""
    digest = mask_digest(problem, mask)
    spaces = tuple(attention_spaces(problem, mask, target))
    mod = attention_workload(problem, digest)
    predict = _attention_model(problem, mask, target)
    usual = [(space, config) for space in spaces for config in space.template.worth_predicting(space.configs)]
    default = min(usual, key=lambda candidate: predict(*candidate))
    return Task(kind_of(problem).title(problem), mod, spaces, predict, default, problem, mask, digest)


def schedule_task(function: tvm.tirx.PrimFunc, name: str) -> Task:
    """The task of a PrimFunc that no template computes."""
    return Task(name, primfunc_workload(function))


def choice_of(task: Task, trace: Trace) -> tuple[Template, Any]:
    """The template and configuration that a candidate's trace chooses; the task must have spaces."""
    choice = chosen(trace, task.templates)
    assert choice is not None
    return choice


def _attention_model(problem, mask, target):
    forms = functools.cache(lambda token_stride: MaskForms(problem, mask, token_stride))
    return _remembered(
        lambda space, config: space.template.predict_us(problem, config, target, forms(config.token_stride))
    )


def _remembered(predict):
    """`predict` with a cache, so that each time is computed once."""
    known = {}

    def remembering(space, config) -> float:
        key = space.template, config  # a space is slow to hash
        if key not in known:
            known[key] = predict(space, config)
        return known[key]

    return remembering
