"""The choice of a segment's kernel template and configuration, with its predicted or measured time."""

import math
from dataclasses import dataclass, replace

import tvm
from tvm import relax

from relax_passes.fusion.matching.segment_problem import NoProblem, SegmentMatch, match_as_group, match_problem
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.template import KernelConfig, Template

NO_TEMPLATES = "TVM compiles it: fused kernels of this project are for GPUs"


@dataclass(frozen=True)
class TemplateChoice:
    """A template, its configuration for the segment's problem, and why these.

    `predicted_us` is the template's own prediction.  `measured_us` is that of the tuning record that chose, or None.
    """

    template: Template
    config: KernelConfig
    match: SegmentMatch
    predicted_us: float
    reason: str
    measured_us: float | None = None

    @property
    def us(self) -> float:
        """The best known time: the measured one, else the predicted one."""
        return self.predicted_us if self.measured_us is None else self.measured_us


class TemplateChooser:
    """Chooses among the kernel templates of a target; equal problems are judged once.

    Parameters
    ----------
    target : tvm.target.Target
        What the kernels are for.
    templates : list of Template
        In order of preference, as `tir_kernels.fusion.registry.templates_for` gives them.
    tuned : TunedChoices, optional
        Its records go before the order of preference and the templates' defaults.
    float32 : str
        How matrix products in float32 are multiplied: "ieee" or "tf32".
    """

    def __init__(
        self,
        target: tvm.target.Target,
        templates: list[Template],
        tuned: TunedChoices | None = None,
        float32: str = "ieee",
    ):
        self.target = target
        self.templates = templates
        self.tuned = tuned
        self.float32 = float32
        self._judged = {}  # problem -> the fields of a choice but the match, or the reason against all templates

    def choose(self, function: relax.Function) -> TemplateChoice | str:
        """The template that a tuning log names or the first that computes a segment, or why none does.

        Where no template of a segment's own problem computes it, as for rows of odd lengths, it may be a group.
        """
        if not self.templates:
            return NO_TEMPLATES
        try:
            match = match_problem(function)
        except NoProblem as reason:
            return str(reason)
        if isinstance(match.problem, GemmProblem) and match.problem.dtype == "float32":
            match = replace(match, problem=replace(match.problem, float32=self.float32))
        judged = self._judged_once(match.problem)
        if isinstance(judged, str) and not isinstance(match.problem, GroupProblem):
            refusal = judged
            try:
                match = match_as_group(function)
            except NoProblem:
                return refusal
            judged = self._judged_once(match.problem)
            judged = refusal if isinstance(judged, str) else judged
        return judged if isinstance(judged, str) else TemplateChoice(match=match, **judged)

    def us(self, problem) -> float:
        """The best known time of a problem's kernel; inf if no template computes it."""
        judged = self._judged_once(problem)
        if isinstance(judged, str):
            return math.inf
        measured_us = judged.get("measured_us")
        return judged["predicted_us"] if measured_us is None else measured_us

    def _judged_once(self, problem) -> dict | str:
        """The judgement of a problem, which is made once."""
        if problem not in self._judged:
            self._judged[problem] = self._judge(problem)
        return self._judged[problem]

    def _judge(self, problem) -> dict | str:
        found = None if self.tuned is None else self.tuned.fusion(problem)
        if found is not None:
            choice = self._choice(problem, found.template, found.config, found.reason)
            return {**choice, "measured_us": found.us}
        refusals = []
        for template in self.templates:
            refusal = template.unsupported(problem, self.target)
            if refusal is None:
                config = template.configs(problem, self.target)[0]
                return self._choice(problem, template, config, "the first template that computes it")
            refusals.append(f"{template.NAME}: {refusal}")
        return "; ".join(refusals)

    def _choice(self, problem, template, config, reason: str) -> dict:
        predicted_us = template.predict_us(problem, config, self.target)
        return {"template": template, "config": config, "predicted_us": predicted_us, "reason": reason}
