"""The configurations of a kernel template for one problem, as a MetaSchedule space: one categorical decision a field.

A schedule of the workload transforms no loops.  It writes the template and the value of each field as annotations
`stof.*` on the anchor block, and the builder of the kernel reads them.  The candidates of a decision are the values
themselves, so that a trace keeps its meaning when a space gains or loses values.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from tir_kernels.attention import registry as attention_registry
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import InputError
from tir_kernels.fusion import registry as fusion_registry
from tir_kernels.tuning.decisions import PREFIX, TEMPLATE, decisions_of
from tir_kernels.tuning.workload import ANCHOR, problem_of


@dataclass(frozen=True)
class TemplateSpace:
    """One template's configurations for one problem.

    Attributes
    ----------
    template : module
        Its `Config` is a dataclass whose fields are integers or booleans.
    configs : tuple of Config
        The legal configurations, the default first.
    """

    template: ModuleType
    configs: tuple

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
    def _by_values(self) -> dict[tuple, object]:
        return {tuple(values_of(config).values()): config for config in self.configs}

    def config(self, values: dict[str, int]) -> object | None:
        """The configuration with these values of the fields; None where it is not legal."""
        return self._by_values.get(tuple(values[name] for name in self.decisions))

    def decisions_for(self, config) -> dict[str, object]:
        """What `decisions_of` gives for the trace of a configuration: the key of its records."""
        return {TEMPLATE: self.name, **values_of(config)}

    def schedule(self, sch: Schedule, config=None) -> None:
        """Decide each field, at random or as `config` says, and annotate the anchor block."""
        anchor = sch.get_sblock(ANCHOR)
        sch.annotate(anchor, PREFIX + TEMPLATE, self.name)
        given = {} if config is None else values_of(config)
        for name, values in self.decisions.items():
            decision = values.index(given[name]) if given else None
            weights = [round(1 / len(values), 3)] * len(values)  # in few digits: every record holds them
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

    def schedule(self, config) -> Schedule:
        """The workload with a configuration's decisions."""
        given = values_of(config)
        decided = [values.index(given[name]) for name, values in self.space.decisions.items()]
        schedule = self.unscheduled.copy()
        trace = Trace(self.instructions, dict(zip(self.choices, decided)))
        trace.apply_to_schedule(schedule, remove_postproc=False)
        return schedule


def fusion_spaces(problem, target: tvm.target.Target, templates: list | None = None) -> list[TemplateSpace]:
    """The spaces of all templates that compute a problem of the fusion templates, in order of preference.

    `templates` are a target's, by default those of the registry.
    """
    return [
        TemplateSpace(template, tuple(template.configs(problem, target)))
        for template in (fusion_registry.templates_for(target) if templates is None else templates)
        if template.unsupported(problem, target) is None
    ]


def has_decisions(template) -> bool:
    """Whether a trace can hold the choice of a template's configuration."""
    config = getattr(template, "Config", None)
    return dataclasses.is_dataclass(config) and all(field.type in (int, bool) for field in dataclasses.fields(config))


def make_known(templates: Iterable) -> None:
    """Register a user's own templates, so that records find them by name; a later one of the same name counts.

    Raises InputError for a template that no record could name.
    """
    for template in templates:
        if not has_decisions(template):
            raise InputError(f"template {template.NAME!r} needs a Config that is a dataclass of integers and booleans")
        TEMPLATES[template_name(template)] = template


def trace_for(mod: tvm.IRModule, space: TemplateSpace, config) -> Trace:
    """The trace that chooses a configuration of a space; InputError where the space does not hold it."""
    if space.config(values_of(config)) is None:
        raise InputError(f"{space.name} {config} is none of the {len(space.configs)} configurations of the space")
    sch = Schedule(mod, debug_mask="none")
    space.schedule(sch, config)
    return sch.trace


def chosen(choice: Schedule | Trace | tvm.IRModule) -> tuple[ModuleType, object] | None:
    """The template and configuration that a schedule, its trace or its module names; None where it names none.

    Raises InputError for a template, or fields of a configuration, that this version does not have.
    """
    decisions = decisions_of(choice) if isinstance(choice, Trace) else _annotations(choice)
    return from_decisions(decisions) if TEMPLATE in decisions else None


def from_decisions(decisions: dict[str, object]) -> tuple[ModuleType, object]:
    """The template and configuration of decisions that name a template.

    Raises InputError for a template that this version does not have, and for fields that its configuration does not
    have or that are missing.
    """
    name = str(decisions.get(TEMPLATE))
    template = TEMPLATES.get(name)
    if template is None:
        raise InputError(f"there is no template {name!r}; there are: {', '.join(TEMPLATES)}")
    known = {field.name: field.type for field in dataclasses.fields(template.Config)}
    values = {field: value for field, value in decisions.items() if field != TEMPLATE}
    if unknown := values.keys() - known.keys():
        raise InputError(f"template {name!r} has no field {', '.join(sorted(unknown))}")
    try:
        return template, template.Config(**{field: known[field](value) for field, value in values.items()})
    except TypeError as error:
        raise InputError(f"template {name!r}: {error}") from None


def completed(decisions: dict[str, object]) -> dict[str, object]:
    """Decisions with the defaults of fields that their template gained after they were written.

    Decisions that this version cannot read, or that name no template, are returned unchanged.
    """
    try:
        template, config = from_decisions(decisions)
    except InputError:
        return decisions
    return {TEMPLATE: template_name(template), **values_of(config)}


def misfit(template: ModuleType, problem, config, target: tvm.target.Target) -> str | None:
    """Why a template cannot compute a problem in a configuration, or None; attention with tokens at any stride."""
    if template.TARGET_KIND != target.kind.name:
        return f"{template_name(template)} is not for {target.kind.name}"
    legal = _legal_configs(template, problem, target)
    if isinstance(legal, str):
        return legal
    if isinstance(problem, AttentionProblem) and getattr(config, "token_stride", 1) > 1:
        config = dataclasses.replace(config, token_stride=1)
    if config not in legal:
        return f"{config.label!r} is no configuration of {template_name(template)} for this problem"
    return None


@functools.lru_cache(maxsize=64)
def _legal_configs(template: ModuleType, problem, target: tvm.target.Target) -> frozenset | str:
    """The legal configurations, which `misfit` needs for each record, or the reason why the template does not fit."""
    return template.unsupported(problem, target) or frozenset(template.configs(problem, target))


def values_of(config) -> dict[str, int]:
    """The fields of a configuration as integers."""
    return {name: int(getattr(config, name)) for name in _field_names(type(config))}


@functools.cache
def _field_names(config_class) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config_class))


def template_name(template: ModuleType) -> str:
    """A template's name, unique among all templates, such as "cuda gemm"."""
    return f"{template.TARGET_KIND} {template.NAME}"


TEMPLATES = {template_name(t): t for t in (*attention_registry.TEMPLATES, *fusion_registry.TEMPLATES)}


def _annotations(choice: Schedule | tvm.IRModule) -> dict[str, object]:
    sch = choice if isinstance(choice, Schedule) else Schedule(choice, debug_mask="none")
    if problem_of(sch.mod) is None:
        return {}
    annotations = sch.get(sch.get_sblock(ANCHOR)).annotations
    return {str(key).removeprefix(PREFIX): x for key, x in annotations.items() if str(key).startswith(PREFIX)}
