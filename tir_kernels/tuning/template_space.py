"""The configurations of a kernel template for one problem, as a MetaSchedule space: one categorical decision a field.

A schedule of the workload transforms no loops.  It writes the template and the value of each field as annotations
`stof.*` on the anchor block, and the builder of the kernel reads them.  The candidates of a decision are the values
themselves, so that a trace keeps its meaning when a space gains or loses values.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from tir_kernels.attention import registry as attention_registry
from tir_kernels.errors import InputError
from tir_kernels.fusion import registry as fusion_registry
from tir_kernels.template import KernelConfig, Template, config_from_json, config_to_json, has_json, template_name
from tir_kernels.tuning.decisions import PREFIX, TEMPLATE, decisions_of
from tir_kernels.tuning.workload import ANCHOR, problem_of

SomeTemplate = TypeVar("SomeTemplate", bound=Template, covariant=True)


@dataclass(frozen=True)
class TemplateSpace(Generic[SomeTemplate]):
    """One template's configurations for one problem.

    Attributes
    ----------
    template : Template
    configs : tuple of Config
        The legal configurations, the default first.
    """

    template: SomeTemplate
    configs: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The template's name, unique among all templates, such as "cuda gemm"."""
        return template_name(self.template)

    @cached_property
    def decisions(self) -> dict[str, tuple[int, ...]]:
        """Name of a field -> the values that it has among the configurations, ascending."""
        fields = [field.name for field in dataclasses.fields(self.template.Config)]
        return {name: tuple(sorted({int(getattr(config, name)) for config in self.configs})) for name in fields}

    @cached_property
    def _by_values(self) -> dict[tuple, Any]:
        return {tuple(config_to_json(config).values()): config for config in self.configs}

    def config(self, values: dict[str, int]) -> Any:
        """The configuration with these values of the fields; None where it is not legal."""
        return self._by_values.get(tuple(values[name] for name in self.decisions))

    def decisions_for(self, config: KernelConfig) -> dict[str, object]:
        """What `decisions_of` gives for the trace of a configuration: the key of its records."""
        return {TEMPLATE: self.name, **config_to_json(config)}

    def schedule(self, sch: Schedule, config: KernelConfig | None = None) -> None:
        """Decide each field, at random or as `config` says, and annotate the anchor block."""
        anchor = sch.get_sblock(ANCHOR)
        sch.annotate(anchor, PREFIX + TEMPLATE, self.name)
        given = {} if config is None else config_to_json(config)
        for name, values in self.decisions.items():
            decision = values.index(given[name]) if given else None
            weights = [round(1 / len(values), 3)] * len(values)  # rounded, because every record holds them
            sch.annotate(anchor, PREFIX + name, sch.sample_categorical(list(values), weights, decision))


class SpaceTraces:
    """Makes the schedules that choose configurations of one space for one workload.

    It does what `TemplateSpace.schedule` does, from instructions that are made once.  A search needs one schedule for
    each trial, and applying a single primitive from Python takes longer than replaying all of them.
    """

    def __init__(self, mod: tvm.IRModule, space: TemplateSpace):
        self.space = space
        self.unscheduled = Schedule(mod, debug_mask="none")
        example = self.unscheduled.copy()
        space.schedule(example, space.configs[0])
        self.instructions = list(example.trace.insts)
        self.choices = [x for x in self.instructions if x.kind.name == "SampleCategorical"]

    def schedule(self, config: KernelConfig) -> Schedule:
        """The workload with a configuration's decisions."""
        given = config_to_json(config)
        decided = [values.index(given[name]) for name, values in self.space.decisions.items()]
        schedule = self.unscheduled.copy()
        trace = Trace(self.instructions, dict(zip(self.choices, decided)))
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return schedule


def fusion_spaces(
    problem, target: tvm.target.Target, templates: Sequence[Template] | None = None
) -> list[TemplateSpace]:
    """The spaces of all templates that compute a problem of the fusion templates, in order of preference.

    `templates` are the templates to consider, by default those that the registry has for the target.
    """
    return [
        TemplateSpace(template, tuple(template.configs(problem, target)))
        for template in (fusion_registry.templates_for(target) if templates is None else templates)
        if template.unsupported(problem, target) is None
    ]


def has_decisions(template: Template) -> bool:
    """Whether a trace can hold the choice of a template's configuration."""
    return has_json(getattr(template, "Config", None))


def check_decisions(templates: Iterable) -> None:
    """Raise InputError for a user's template whose configurations no record can hold."""
    for template in templates:
        if not has_decisions(template):
            raise InputError(f"template {template.NAME!r} needs a Config that is a dataclass of integers and booleans")


def trace_for(mod: tvm.IRModule, space: TemplateSpace, config: KernelConfig) -> Trace:
    """The trace that chooses a configuration of a space; InputError where the space does not hold it."""
    if space.config(config_to_json(config)) is None:
        raise InputError(f"{space.name} {config} is none of the {len(space.configs)} configurations of the space")
    sch = Schedule(mod, debug_mask="none")
    space.schedule(sch, config)
    return sch.trace


def chosen(choice: Schedule | Trace | tvm.IRModule, own: Iterable = ()) -> tuple[Template, Any] | None:
    """The template and configuration that a schedule, its trace or its module names; None where it names none.

    `own` are a user's templates, as `from_decisions` takes them.

    Raises InputError for a template, or fields of a configuration, that this version does not have.
    """
    decisions = decisions_of(choice) if isinstance(choice, Trace) else _annotations(choice)
    return from_decisions(decisions, own) if TEMPLATE in decisions else None


def from_decisions(decisions: dict[str, object], own: Iterable = ()) -> tuple[Template, Any]:
    """The template and configuration of decisions that name a template.

    `own` are a user's templates.  They take precedence over the project's templates of the same name; among themselves
    the later one does.  Templates whose choice no record can hold are ignored.

    Raises InputError for a template that this version does not have, and for fields that its configuration does not
    have or that are missing.
    """
    name = str(decisions.get(TEMPLATE))
    there = {**TEMPLATES, **{template_name(x): x for x in own if has_decisions(x)}}
    template = there.get(name)
    if template is None:
        raise InputError(f"there is no template {name!r}; there are: {', '.join(there)}")
    values = {field: value for field, value in decisions.items() if field != TEMPLATE}
    return template, config_from_json(template, values)


def completed(decisions: dict[str, object], own: Iterable = ()) -> dict[str, object]:
    """Decisions with defaults for fields that were added to their template after the decisions were written.

    Decisions that this version cannot read, or that name no template, are returned unchanged.
    """
    try:
        template, config = from_decisions(decisions, own)
    except InputError:
        return decisions
    return {TEMPLATE: template_name(template), **config_to_json(config)}


def misfit(template: Template, problem, config: KernelConfig, target: tvm.target.Target) -> str | None:
    """Why a template cannot compute a problem in a configuration, or None; any token stride is accepted."""
    if template.TARGET_KIND != target.kind.name:
        return f"{template_name(template)} is not for {target.kind.name}"
    legal = _legal_configs(template, problem, target)
    if isinstance(legal, str):
        return legal
    if getattr(config, "token_stride", 1) > 1:
        config = dataclasses.replace(config, token_stride=1)
    if config not in legal:
        return f"{config.label!r} is no configuration of {template_name(template)} for this problem"
    return None


@functools.lru_cache(maxsize=64)
def _legal_configs(template: Template, problem, target: tvm.target.Target) -> frozenset | str:
    """The legal configurations, or why the template cannot compute the problem; cached for a workload's records."""
    return template.unsupported(problem, target) or frozenset(template.configs(problem, target))


TEMPLATES: dict[str, Template] = {
    template_name(t): t for t in (*attention_registry.TEMPLATES, *fusion_registry.TEMPLATES)
}


def _annotations(choice: Schedule | tvm.IRModule) -> dict[str, object]:
    sch = choice if isinstance(choice, Schedule) else Schedule(choice, debug_mask="none")
    if problem_of(sch.mod) is None:
        return {}
    annotations = sch.get(sch.get_sblock(ANCHOR)).annotations
    return {str(key).removeprefix(PREFIX): x for key, x in annotations.items() if str(key).startswith(PREFIX)}
