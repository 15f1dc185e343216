"""Which kernel template computes a fusion group, in which configuration, and in what time."""

from dataclasses import dataclass
from types import ModuleType

import tvm
from tvm import relax

from relax_passes.fusion.segment_problem import NoProblem, SegmentMatch, match_problem


@dataclass(frozen=True)
class TemplateChoice:
    """A template, its default configuration for the group's problem, and the predicted microseconds."""

    template: ModuleType
    config: object
    match: SegmentMatch
    predicted_us: float

    @property
    def workspace(self) -> list:
        """(shape, dtype) of the zeros that the kernel takes between inputs and outputs."""
        return self.template.workspace(self.match.problem, self.config)


class TemplateChooser:
    """Chooses among the kernel templates of a target; equal problems are judged once.

    Parameters
    ----------
    target : tvm.target.Target
        What the kernels are for.
    templates : list of module
        In order of preference, as `tir_kernels.fusion.registry.templates_for` gives them.
    """

    def __init__(self, target: tvm.target.Target, templates: list[ModuleType]):
        self.target = target
        self.templates = templates
        self._judged = {}  # problem -> (template, config, microseconds), or the reason against all

    def choose(self, function: relax.Function) -> TemplateChoice | str:
        """The first template that computes a group, or why none does."""
        if not self.templates:
            return f"no templates for {self.target.kind.name}"
        try:
            match = match_problem(function)
        except NoProblem as reason:
            return str(reason)
        if match.problem not in self._judged:
            self._judged[match.problem] = self._judge(match.problem)
        judged = self._judged[match.problem]
        if isinstance(judged, str):
            return judged
        template, config, predicted_us = judged
        return TemplateChoice(template, config, match, predicted_us)

    def _judge(self, problem):
        refusals = []
        for template in self.templates:
            refusal = template.unsupported(problem, self.target)
            if refusal is None:
                config = template.configs(problem, self.target)[0]
                return template, config, template.predict_us(problem, config, self.target)
            refusals.append(f"{template.NAME}: {refusal}")
        return "; ".join(refusals)
