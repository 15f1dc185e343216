"""Deferred norms: norms that no kernel computes, because the products before and after them do.

    x = a @ w1 + b1 + residual          x and the statistics of its rows, by one kernel
    y = layer_norm(x)                   no kernel
    z = y @ w2 + b2                     scale * (x @ w2' - mean * columns[0]) + columns[1]
    r = c @ w3 + b3 + y                 x is normalised as it is added

The mean and the scale of each row come from its statistics.  A norm is deferred if it is a segment by itself, one
product writes its input, only products read its result, and their weights are constants.  w2' = weight * w2, rounded
once, replaces w2.  The contribution of the norm's bias is added to the product's own bias in one float32 vector.  This
also saves rounding y to half precision.  A norm keeps its kernel if the products' additional work would take longer.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.segment_calls import SegmentCall, SegmentCalls
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from relax_passes.ir.bindings import Bindings
from tir_kernels.errors import StofError
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step

LAUNCH_US = 1.0  # part of a norm's predicted time: its launch, which overlaps the end of the product before it


@dataclass(frozen=True)
class Statistics:
    """An input of a kernel: the statistics that the kernel of another call writes."""

    call: relax.Var


@dataclass(frozen=True)
class Later:
    """An input that is computed only once it is known to be needed."""

    compute: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Plan:
    """How one call of a segment is computed.

    Attributes
    ----------
    choice : TemplateChoice
        The choice for the segment by itself.
    problem, config
        The problem and the configuration for which the template makes the kernel.
    inputs : tuple
        The problem's inputs: expressions of the segment, arrays, or Statistics.
    note : str
        Why the plan differs from the choice, for the report.
    """

    choice: TemplateChoice
    problem: Any  # each template's own
    config: Any
    inputs: tuple
    note: str = ""


class DeferredNorms:
    """Decides which norms of "main" are deferred.

    Attributes
    ----------
    plans : dict of relax.Var to Plan
        The plan of every call that is still a kernel.
    deferred : dict of relax.Var to str
        The calls that are no longer kernels, and why.
    """

    def __init__(self, main: Bindings, calls: Iterable[SegmentCall], chooser: TemplateChooser):
        self.chooser = chooser
        self.calls = SegmentCalls(main, calls)
        self.plans = {var: _as_chosen(self.calls[var].choice) for var in self.calls}
        self.deferred = {}
        self._configs = {}  # problem -> its configurations, None where its template refuses it
        self._uses = Counter(self._value(var, x) for var, plan in self.plans.items() for x in plan.inputs)
        for var in self.calls:
            changed = self._without(var)
            if changed is not None:
                self.plans |= changed
                del self.plans[var]
                self.deferred[var] = f"its product gives statistics, {len(changed) - 1} after it normalise"

    def _without(self, var) -> dict | None:
        """The plans of other calls, changed so that the norm `var` needs no kernel; None where that cannot be."""
        choice = self.calls[var].choice
        problem: Any = choice.match.problem
        is_norm = type(problem) is RowProblem and problem.norm is not None and not problem.steps
        if not is_norm or problem.keeps_sum:
            return None
        writer, readers = self.calls.writer(var, choice.match.inputs[0]), self.calls.readers(var)
        if writer is None or not readers or not all(map(self._is_product, [writer, *readers])):
            return None
        norm_us = choice.predicted_us - LAUNCH_US if choice.measured_us is None else choice.measured_us
        try:
            changed = {writer: self._giving(writer, problem.n)}
            for reader, position in readers.items():
                changed[reader] = self._reading(reader, position, var, writer)
            extra_us = sum(self._us(plan) - self._us(self.plans[var]) for var, plan in changed.items())
            return {var: _computed(plan) for var, plan in changed.items()} if extra_us < norm_us else None
        except (_CannotDefer, StofError):
            return None

    def _is_product(self, var) -> bool:
        """Whether a call is a product whose template knows deferred norms."""
        choice = self.calls[var].choice
        problem = choice.match.problem
        is_one = type(problem) is GemmProblem and problem.takes_norms
        return is_one and getattr(choice.template, "DEFERS_NORMS", False)

    def _giving(self, var, n: int) -> Plan:
        """The plan of a product with rows of n that also gives their statistics."""
        plan = self.plans[var]
        if plan.problem.n != n:
            raise _CannotDefer
        if plan.problem.statistics:
            return plan
        return self._changed(plan, replace(plan.problem, statistics=True), plan.inputs, "gives statistics of its rows")

    def _reading(self, var, position: int, norm_var, writer) -> Plan:
        """The plan of a product that normalises its own input at `position`, which was the norm's result."""
        plan, match = self.plans[var], self.calls[norm_var].choice.match
        problem: Any = match.problem
        norm, n = problem.norm, plan.problem.n if position else plan.problem.k
        if plan.problem.row_norm is not None or problem.n != n:
            raise _CannotDefer
        vectors = [self._array(norm_var, expr).astype("float32") for expr in match.inputs[1:]]
        weight = vectors[0] if norm.weight else np.ones(n, "float32")
        bias = vectors[-1] if norm.bias else np.zeros(n, "float32")
        if position == 0:
            return self._reading_a(var, norm, weight, bias, writer)
        return self._reading_residual(var, position, norm, np.stack([weight, bias]), writer)

    def _reading_a(self, var, norm: Norm, weight: np.ndarray, bias: np.ndarray, writer) -> Plan:
        """The plan of a product that normalises a: the norm's weight goes into w, its mean and bias into columns."""
        plan, is_centred = self.plans[var], norm.kind == "layer_norm"
        w = self._value(var, plan.inputs[1])
        # If others need w unchanged, it would be held twice.
        if not isinstance(w, GenericConst) or self._uses[w] > 1 or norm.bias and not is_centred:
            raise _CannotDefer
        steps, inputs = list(plan.problem.steps), list(plan.inputs)
        own = self._taken_bias(var, steps, inputs, 1) if is_centred else 0.0
        fold = functools.cache(lambda: _folded(w.value.numpy(), plan.problem.w_layout, weight, bias, own))
        columns = [Later(lambda: fold()[1])] if is_centred else []
        inputs[1:2] = [Later(lambda: fold()[0]), Statistics(writer), *columns]
        problem = replace(plan.problem, a_norm=_bare(norm), steps=tuple(steps))
        return self._changed(plan, problem, inputs, f"normalises its input ({norm.kind})")

    def _reading_residual(self, var, position: int, norm: Norm, columns: np.ndarray, writer) -> Plan:
        """The plan of a product to which the norm's result is added; `columns` are the norm's weight and bias."""
        plan = self.plans[var]
        steps, inputs = list(plan.problem.steps), list(plan.inputs)
        binary = [i for i, step in enumerate(steps) if step.operand is not None]
        at = binary[position - 2] if 2 <= position < 2 + len(binary) else None
        if at is None or steps[at] != Step("add", "matrix"):
            raise _CannotDefer
        steps[at] = Step("add", "normed", norm=_bare(norm))
        inputs[position + 1 : position + 1] = [Statistics(writer), columns]
        columns[1] += self._taken_bias(var, steps, inputs, at)
        note = f"normalises its residual ({norm.kind})"
        return self._changed(plan, replace(plan.problem, steps=tuple(steps)), inputs, note)

    def _taken_bias(self, var, steps: list[Step], inputs: list, count: int):
        """The constant vector that the first step adds, removed from `steps` and `inputs`; 0 if there is none.

        It is removed only if the first `count` steps are all sums, whose order may change.
        """
        first = steps[:count]
        value = self._value(var, inputs[2]) if first and first[0] == Step("add", "row") else None
        if not isinstance(value, GenericConst) or any(step.kind != "add" for step in first):
            return 0.0
        del steps[0], inputs[2]
        return value.value.numpy().astype("float32").reshape(-1)

    def _changed(self, plan: Plan, problem: GemmProblem, inputs, note: str) -> Plan:
        """The plan with another problem, in the same configuration where that is possible."""
        template, target = plan.choice.template, self.chooser.target
        if problem not in self._configs:
            refusal = template.unsupported(problem, target)
            self._configs[problem] = template.configs(problem, target) if refusal is None else None
        configs = self._configs[problem]
        if configs is None:
            raise _CannotDefer
        config = plan.config if plan.config in configs else configs[0]
        note = f"{plan.note}; {note}" if plan.note else note
        return Plan(plan.choice, problem, config, tuple(inputs), note)

    def _us(self, plan: Plan) -> float:
        """Predicted microseconds."""
        return plan.choice.template.predict_us(plan.problem, plan.config, self.chooser.target)

    def _value(self, var, expr):
        """The value that `expr`, an expression of the segment that `var` calls, is bound to."""
        return self.calls.inside[var].value(expr)

    def _array(self, var, expr) -> np.ndarray:
        value = self._value(var, expr)
        if not isinstance(value, GenericConst):
            raise _CannotDefer
        return value.value.numpy()


class _CannotDefer(Exception):
    """A product cannot take over its part of a norm."""


def _computed(plan: Plan) -> Plan:
    """The plan with its `Later` inputs computed."""
    return replace(plan, inputs=tuple(x.compute() if isinstance(x, Later) else x for x in plan.inputs))


def _folded(w: np.ndarray, layout: str, weight: np.ndarray, bias: np.ndarray, own) -> tuple[np.ndarray, np.ndarray]:
    """(the product's weight times the norm's, `columns` with the product's `own` bias in the second row)."""
    wide = w.astype("float32") if layout == "nk" else w.astype("float32").T
    with np.errstate(over="ignore"):
        folded = (wide * weight).astype(w.dtype)
    sums = folded.astype("float32").sum(1, dtype="float64")
    if not np.isfinite(sums).all():
        raise _CannotDefer
    columns = np.stack([sums, (wide * bias).sum(1, dtype="float64") + own]).astype("float32")
    return (folded if layout == "nk" else np.ascontiguousarray(folded.T)), columns


def _bare(norm: Norm) -> Norm:
    return Norm(norm.kind, norm.eps, False, False)


def _as_chosen(choice: TemplateChoice) -> Plan:
    return Plan(choice, choice.match.problem, choice.config, choice.match.inputs)
