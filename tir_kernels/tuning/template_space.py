"""The configurations of a kernel template for one problem, as a MetaSchedule space: one categorical decision a field.

A schedule of the workload makes no loops; it writes the template and the value of each field as annotations `stof.*`
on the anchor block, for whoever builds the kernel to read.  The values themselves are the candidates of a decision, so
that a trace still means the same when a space gains or loses values.
"""

import dataclasses
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
from tir_kernels.tuning.workload import ANCHOR, problem_of

PREFIX = "stof."
TEMPLATE = "stof.template"


@dataclass(frozen=True)
class TemplateSpace:
    """One template's configurations for one problem.

    Attributes
    ----------
    template : module
        Its `Config` is a dataclass whose fields are integers or booleans.
    configs : tuple of Config
        Those that are legal, the default first.
    """

    template: ModuleType
    configs: tuple

    @property
    def name(self) -> str:
        """Of the template, unique among all: "cuda gemm"."""
        return template_name(self.template)

    @cached_property
    def decisions(self) -> dict[str, tuple]:
        """Name of a field -> the values that it has among the configurations, ascending."""
        fields = [field.name for field in dataclasses.fields(self.template.Config)]
        return {name: tuple(sorted({int(getattr(config, name)) for config in self.configs})) for name in fields}

    @cached_property
    def _by_values(self) -> dict[tuple, object]:
        return {tuple(values_of(config).values()): config for config in self.configs}

    def config(self, values: dict[str, int]) -> object | None:
        """The configuration with these values of the fields; None where it is not legal."""
        return self._by_values.get(tuple(values[name] for name in self.decisions))

    def schedule(self, sch: Schedule, config=None) -> None:
        """Decide each field, at random or as `config` says, and annotate the anchor block."""
        anchor = sch.get_sblock(ANCHOR)
        sch.annotate(anchor, TEMPLATE, self.name)
        given = {} if config is None else values_of(config)
        for name, values in self.decisions.items():
            decision = values.index(given[name]) if given else None
            probabilities = [1.0 / len(values)] * len(values)
            sch.annotate(anchor, PREFIX + name, sch.sample_categorical(list(values), probabilities, decision))


def fusion_spaces(problem, target: tvm.target.Target) -> list[TemplateSpace]:
    """The spaces of all templates that compute a problem of the fusion templates, in order of preference."""
    return [
        TemplateSpace(template, tuple(template.configs(problem, target)))
        for template in fusion_registry.templates_for(target)
        if template.unsupported(problem, target) is None
    ]


def trace_for(mod: tvm.IRModule, space: TemplateSpace, config) -> Trace:
    """The trace that chooses a configuration of a space; InputError where the space does not hold it."""
    if config not in space.configs:
        raise InputError(f"{space.name} {config} is none of the {len(space.configs)} configurations of the space")
    sch = Schedule(mod, debug_mask="none")
    space.schedule(sch, config)
    return sch.trace


def chosen(choice: Schedule | Trace | tvm.IRModule) -> tuple[ModuleType, object] | None:
    """The template and configuration that a schedule, its trace or its module names; None where it names none.

    Raises InputError for a template, or fields of a configuration, that this version does not have.
    """
    values = _annotations_of_trace(choice) if isinstance(choice, Trace) else _annotations_of_block(choice)
    return None if TEMPLATE not in values else from_annotations(values)


def from_annotations(values: dict[str, object]) -> tuple[ModuleType, object]:
    """The template and configuration of annotations `stof.*`; InputError where this version does not have them."""
    fields = {name.removeprefix(PREFIX): value for name, value in values.items() if name != TEMPLATE}
    template = _TEMPLATES.get(str(values[TEMPLATE]))
    if template is None:
        raise InputError(f"there is no template {values[TEMPLATE]!r}; there are: {', '.join(_TEMPLATES)}")
    known = {field.name: field for field in dataclasses.fields(template.Config)}
    if unknown := fields.keys() - known.keys():
        raise InputError(f"{values[TEMPLATE]} has no field {', '.join(sorted(unknown))}")
    try:
        return template, template.Config(**{name: known[name].type(value) for name, value in fields.items()})
    except TypeError as error:
        raise InputError(f"{values[TEMPLATE]}: {error}") from None


def misfit(template: ModuleType, problem, config, target: tvm.target.Target) -> str | None:
    """Why a template cannot compute a problem in a configuration, or None; attention with tokens at any stride."""
    reason = template.unsupported(problem, target)
    if reason is not None:
        return reason
    if isinstance(problem, AttentionProblem) and getattr(config, "token_stride", 1) > 1:
        config = dataclasses.replace(config, token_stride=1)
    if config not in template.configs(problem, target):
        return f"{config.label!r} is no configuration of {template_name(template)} for this problem"
    return None


def values_of(config) -> dict[str, int]:
    """The fields of a configuration as integers."""
    return {field.name: int(getattr(config, field.name)) for field in dataclasses.fields(config)}


def template_name(template: ModuleType) -> str:
    return f"{template.TARGET_KIND} {template.NAME}"


_TEMPLATES = {template_name(t): t for t in (*attention_registry.TEMPLATES, *fusion_registry.TEMPLATES)}


def _annotations_of_block(choice: Schedule | tvm.IRModule) -> dict[str, object]:
    sch = choice if isinstance(choice, Schedule) else Schedule(choice, debug_mask="none")
    if problem_of(sch.mod) is None:
        return {}
    annotations = sch.get(sch.get_sblock(ANCHOR)).annotations
    return {str(name): value for name, value in annotations.items() if str(name).startswith(PREFIX)}


def _annotations_of_trace(trace: Trace) -> dict[str, object]:
    decided, annotations = {}, {}
    for instruction in trace.insts:
        if instruction.kind.name == "SampleCategorical":
            decided[instruction.outputs[0]] = instruction.attrs[0][int(trace.decisions[instruction])]
        elif instruction.kind.name == "Annotate" and str(instruction.attrs[0]).startswith(PREFIX):
            value = instruction.inputs[1]
            annotations[str(instruction.attrs[0])] = decided.get(value, value)
    return annotations
