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
from tir_kernels.template import Template
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest
from tir_kernels.tuning.template_space import SpaceTraces, TemplateSpace, chosen, fusion_spaces
from tir_kernels.tuning.workload import attention_workload, fusion_workload, primfunc_workload


@dataclass(eq=False)
class Task:
    """Something to tune; equal workloads are one task.

    Attributes
    ----------
    name : str
        For people.
    mod : tvm.IRModule
        The workload.
    spaces : tuple of TemplateSpace
        Of the templates that compute it; none where MetaSchedule's own rules make the candidates.
    predict : callable, optional
        From a space and a configuration to predicted microseconds.
    default : (TemplateSpace, Config), optional
        What a build without logs takes.
    problem : optional
        That templates compute.
    mask : Mask, optional
        An attention's, with `digest`.
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
        """What the default takes; None where nothing predicts it."""
        return None if self.default is None or self.predict is None else self.predict(*self.default)

    @property
    def templates(self) -> tuple[Template, ...]:
        """Those of the spaces."""
        return tuple(space.template for space in self.spaces)

    @functools.cached_property
    def traces(self) -> dict[Template, SpaceTraces]:
        """What makes the schedules of each space's candidates, by its template."""
        return {space.template: SpaceTraces(self.mod, space) for space in self.spaces}


def fusion_task(problem, target: tvm.target.Target, templates: list | None = None) -> Task:
    """The task of a problem that a fusion template computes, one of `templates` where these are given."""
    spaces = tuple(fusion_spaces(problem, target, templates))
    predict = _remembered(lambda space, config: space.template.predict_us(problem, config, target))
    default = spaces[0], spaces[0].configs[0]
    return Task(problem_name(problem), fusion_workload(problem), spaces, predict, default, problem)


def attention_task(problem: AttentionProblem, mask, target: tvm.target.Target) -> Task:
    """The task of an attention with a mask."""
    digest = mask_digest(problem, mask)
    spaces = tuple(attention_spaces(problem, mask, target))
    mod = attention_workload(problem, digest)
    predict = _attention_model(problem, mask, target)
    usual = [(space, config) for space in spaces for config in space.template.worth_predicting(space.configs)]
    default = min(usual, key=lambda candidate: predict(*candidate))
    return Task(problem_name(problem), mod, spaces, predict, default, problem, mask, digest)


def schedule_task(function: tvm.tirx.PrimFunc, name: str) -> Task:
    """The task of a PrimFunc that no template computes."""
    return Task(name, primfunc_workload(function))


def choice_of(task: Task, trace: Trace) -> tuple[Template, Any]:
    """The template and configuration that the trace of a candidate chooses, of a task with spaces."""
    choice = chosen(trace, task.templates)
    assert choice is not None
    return choice


def problem_name(problem) -> str:
    """For people: "gemm 128x3072x768 add gelu", "attention 1x12x128x128x64"."""
    if isinstance(problem, AttentionProblem):
        return f"attention {problem.batch}x{problem.q_heads}x{problem.q_len}x{problem.kv_len}x{problem.head_dim}"
    sizes = [getattr(problem, name) for name in ("m", "n", "k", "batch", "length", "heads") if hasattr(problem, name)]
    kind = type(problem).__name__.removesuffix("Problem").lower()
    steps = [step.kind for step in getattr(problem, "steps", ())]
    norm = getattr(problem, "norm", None)
    return " ".join([kind, "x".join(map(str, sizes)), *steps, *([norm.kind] if norm else [])])


def _attention_model(problem, mask, target):
    forms = functools.cache(lambda token_stride: MaskForms(problem, mask, token_stride))
    return _remembered(
        lambda space, config: space.template.predict_us(problem, config, target, forms(config.token_stride))
    )


def _remembered(predict):
    """The same function, which computes each time once."""
    known = {}

    def remembering(space, config) -> float:
        key = space.template, config  # a space is slow to hash
        if key not in known:
            known[key] = predict(space, config)
        return known[key]

    return remembering
