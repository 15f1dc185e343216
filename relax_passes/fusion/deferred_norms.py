"""Deferred norms: norms that no kernel computes, because the products before and after them do.

    x = a @ w1 + b1 + residual          x and the statistics of its rows, by one kernel
    y = layer_norm(x)                   no kernel
    z = y @ w2                          scale * (x @ w2' - mean * columns[0]) + columns[1], the row's mean and scale of
    r = c @ w3 + y                      its statistics; a residual is normalised as it is added

A norm is deferred where it is a segment by itself, one product writes what it normalises, nothing but products reads
its result, and their weights are constants: w2' = weight * w2, rounded once, takes the place of w2.  Rounding y to half
precision is saved.  It pays where the norm's kernel takes longer than what the products have to do more.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.bindings import Bindings
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from tir_kernels.errors import StofError
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step

EXTRA_US = 0.25  # that a product takes longer which writes statistics or reads them


@dataclass(frozen=True)
class Statistics:
    """An input of a kernel: the statistics that the kernel of another call writes."""

    call: relax.Var


@dataclass(frozen=True)
class Plan:
    """How one call of a group is computed.

    Attributes
    ----------
    choice : TemplateChoice
        Of the group by itself.
    problem, config
        What the template is asked for.
    inputs : tuple
        Of the problem: expressions of the group, arrays, or Statistics.
    note : str
        Why this differs from the choice, for the report.
    """

    choice: TemplateChoice
    problem: Any  # each template's own
    config: Any
    inputs: tuple
    note: str = ""


@dataclass(frozen=True)
class GroupCall:
    """A call of a group's function in "main" whose kernel a template gives."""

    var: relax.Var
    function: relax.Function
    arguments: tuple
    choice: TemplateChoice

    def results(self) -> list:
        """The variables that the function returns."""
        body = self.function.body.body
        return list(body.fields) if isinstance(body, relax.Tuple) else [body]


class DeferredNorms:
    """Decides which norms of "main" are deferred.

    Attributes
    ----------
    plans : dict of relax.Var to Plan
        Of every call that is still a kernel.
    deferred : dict of relax.Var to str
        The calls that are not, and why.
    """

    def __init__(self, main: Bindings, calls: Iterable[GroupCall], chooser: TemplateChooser):
        self.main = main
        self.chooser = chooser
        self.calls = {call.var: call for call in calls}
        self.inside = {var: Bindings(call.function) for var, call in self.calls.items()}
        self.plans = {var: _as_chosen(call.choice) for var, call in self.calls.items()}
        self.deferred = {}
        self._configs = {}  # problem -> its configurations, None where its template refuses it
        self.weights = Counter(self._weight(var) for var in self.calls if self._is_product(var))
        for var in self.calls:
            changed = self._without(var)
            if changed is not None:
                self.plans |= changed
                del self.plans[var]
                self.deferred[var] = f"its product gives statistics, {len(changed) - 1} after it normalise"

    def _without(self, var) -> dict | None:
        """The plans of the other calls, changed so that the norm `var` needs no kernel; None where that cannot be."""
        problem: Any = self.calls[var].choice.match.problem
        is_norm = type(problem) is RowProblem and problem.norm is not None and not problem.steps
        if not is_norm or problem.keeps_sum:
            return None
        producer = self._written_by(var)
        readers = self._readers(var)
        if producer is None or not readers or self.plans[producer].problem.n != problem.n:
            return None
        try:
            changed = {producer: self._giving(producer)}
            for reader, position in readers.items():
                plan = changed.get(reader, self.plans[reader])
                changed[reader] = self._reading(plan, position, var, producer)
        except (_Cannot, StofError):
            return None
        extra_us = sum(EXTRA_US + self._slower_us(plan) for plan in changed.values())
        return changed if extra_us < self.calls[var].choice.us else None

    # -- who writes and reads what ---------------------------------------------------------------------------------

    def _is_product(self, var) -> bool:
        """Whether a call is a product whose template knows deferred norms."""
        choice = self.calls[var].choice
        is_one = type(choice.match.problem) is GemmProblem and choice.match.problem.norm is None
        return is_one and getattr(choice.template, "DEFERS_NORMS", False)

    def _written_by(self, var):
        """The product whose result the norm `var` normalises, or None."""
        call, inside = self.calls[var], self.inside[var]
        source = _elements_of(inside, call.choice.match.inputs[0])
        if source not in call.function.params:
            return None
        index = [p.same_as(source) for p in call.function.params].index(True)
        value, item = _elements_of(self.main, call.arguments[index]), 0
        bound = self.main.value(value)
        if isinstance(bound, relax.TupleGetItem):
            value, item = bound.tuple_value, bound.index
        if value not in self.calls or not self._is_product(value):
            return None
        result = _elements_of(self.inside[value], self.calls[value].results()[item])
        (out,) = self.calls[value].choice.match.outputs
        return value if result.same_as(out) and _is_whole(self.calls[value].choice) else None

    def _readers(self, var) -> dict | None:
        """The calls that read the norm's result, each with which of its inputs that is; None if others read it."""
        (result,) = self.calls[var].results()
        (out,) = self.calls[var].choice.match.outputs
        if not _elements_of(self.inside[var], result).same_as(out):
            return None
        found, pending = {}, [var]
        while pending:
            value = pending.pop()
            if value in self.main.outputs:
                return None
            for reader in self.main.readers[value]:
                if reader in self.calls and self._is_product(reader):
                    position = self._position(reader, value)
                    if position is None or reader in found:
                        return None
                    found[reader] = position
                elif _elements_of(self.main, reader, steps=1).same_as(value):
                    pending.append(reader)
                else:
                    return None
        return found

    def _position(self, var, value) -> int | None:
        """Which input of a product's problem an argument of its call is, if it is one of them and nothing else."""
        call, inside = self.calls[var], self.inside[var]
        params = [p for p, argument in zip(call.function.params, call.arguments) if argument.same_as(value)]
        if len(params) != 1:
            return None
        (param,) = params
        reading = [i for i, expr in enumerate(call.choice.match.inputs) if _depends(inside, expr, param)]
        if len(reading) != 1 or not _elements_of(inside, call.choice.match.inputs[reading[0]]).same_as(param):
            return None
        return reading[0]

    # -- other problems for the same templates ---------------------------------------------------------------------

    def _giving(self, var) -> Plan:
        """The product's plan, with statistics of what it writes."""
        plan = self.plans[var]
        if plan.problem.statistics:
            return plan
        return self._changed(plan, replace(plan.problem, statistics=True), plan.inputs, "gives statistics of its rows")

    def _reading(self, plan: Plan, position: int, norm_call, producer) -> Plan:
        """The product's plan, with an input that is not normalised yet."""
        choice = self.calls[norm_call].choice
        normed: Any = choice.match.problem
        norm = normed.norm
        vectors = [_constant(self.inside[norm_call], expr) for expr in choice.match.inputs[1:]]
        width = plan.problem.k if position == 0 else plan.problem.n
        if plan.problem.row_norm is not None or width != normed.n:
            raise _Cannot
        if position == 0:
            bare = Norm(norm.kind, norm.eps, False, False)
            weight, columns = self._folded(plan, norm, vectors)
            new = [plan.inputs[0], weight, Statistics(producer), *columns, *plan.inputs[2:]]
            return self._changed(plan, replace(plan.problem, a_norm=bare), new, f"normalises its input ({norm.kind})")
        steps = list(plan.problem.steps)
        binary = [i for i, step in enumerate(steps) if step.operand is not None]
        at = binary[position - 2] if 2 <= position < 2 + len(binary) else None
        if at is None or steps[at] != Step("add", "matrix"):
            raise _Cannot
        steps[at] = Step("add", "normed", norm=norm)
        new = [*plan.inputs[: position + 1], Statistics(producer), *vectors, *plan.inputs[position + 1 :]]
        problem = replace(plan.problem, steps=tuple(steps))
        return self._changed(plan, problem, new, f"normalises its residual ({norm.kind})")

    def _folded(self, plan: Plan, norm: Norm, vectors: list) -> tuple[np.ndarray, list]:
        """The product's weight with the norm's in it, and what `columns` of the problem is."""
        weight = plan.inputs[1]
        if isinstance(weight, np.ndarray) or norm.bias and norm.kind == "rms_norm":
            raise _Cannot
        constant = self._value_of(plan, weight)
        if self.weights[constant] > 1:  # others need it as it is
            raise _Cannot
        array = constant.value.numpy()
        along_k = (slice(None), None) if plan.problem.w_layout == "kn" else (None, slice(None))
        axis = 0 if plan.problem.w_layout == "kn" else 1
        wide = array.astype("float32")
        values = [x.astype("float32") for x in vectors]
        folded = (wide * values[0][along_k]).astype(array.dtype) if norm.weight else array
        if norm.kind == "rms_norm":
            return folded, []
        sums = folded.astype("float32").sum(axis, dtype="float64")
        shift = (wide * values[-1][along_k]).sum(axis, dtype="float64") if norm.bias else np.zeros_like(sums)
        return folded, [np.stack([sums, shift]).astype("float32")]

    def _changed(self, plan: Plan, problem: GemmProblem, inputs, note: str) -> Plan:
        """The plan with another problem, in the same configuration where that is possible."""
        template, target = plan.choice.template, self.chooser.target
        if problem not in self._configs:
            refusal = template.unsupported(problem, target)
            self._configs[problem] = template.configs(problem, target) if refusal is None else None
        configs = self._configs[problem]
        if configs is None:
            raise _Cannot
        config = plan.config if plan.config in configs else configs[0]
        note = f"{plan.note}; {note}" if plan.note else note
        return Plan(plan.choice, problem, config, tuple(inputs), note)

    def _slower_us(self, plan: Plan) -> float:
        """What another configuration than the chosen one is predicted to cost."""
        choice = plan.choice
        if plan.config == choice.config:
            return 0.0
        predict = lambda config: choice.template.predict_us(choice.match.problem, config, self.chooser.target)
        return max(0.0, predict(plan.config) - predict(choice.config))

    # -- constants -------------------------------------------------------------------------------------------------

    def _weight(self, var):
        return self.inside[var].value(self.calls[var].choice.match.inputs[1])

    def _value_of(self, plan: Plan, expr) -> GenericConst:
        (var,) = [var for var, other in self.plans.items() if other.choice is plan.choice]
        value = self.inside[var].value(expr)
        if not isinstance(value, GenericConst):
            raise _Cannot
        return value


class _Cannot(Exception):
    """A product cannot take over its part of a norm."""


def _as_chosen(choice: TemplateChoice) -> Plan:
    return Plan(choice, choice.match.problem, choice.config, choice.match.inputs)


def _is_whole(choice: TemplateChoice) -> bool:
    return len(choice.match.outputs) == 1


def _constant(bindings: Bindings, expr) -> np.ndarray:
    value = bindings.value(expr)
    if not isinstance(value, GenericConst):
        raise _Cannot
    return value.value.numpy()


def _elements_of(bindings: Bindings, expr, steps: int | None = None):
    """What `expr` has the elements of, in their order, through so many views and aliases, or through all."""
    while steps is None or steps > 0:
        bound = bindings.values.get(expr) if isinstance(expr, relax.Var) else None
        inner = bound if isinstance(bound, relax.Var) else bindings.same_elements(expr)
        if inner is None:
            return expr
        expr = inner
        steps = None if steps is None else steps - 1
    return expr


def _depends(bindings: Bindings, expr, param) -> bool:
    """Whether an expression reads a parameter, through whatever lies between."""
    pending, seen = list(relax.analysis.free_vars(expr)), set()
    while pending:
        var = pending.pop()
        if var.same_as(param):
            return True
        if var not in seen and var in bindings.values:
            seen.add(var)
            pending += relax.analysis.free_vars(bindings.values[var])
    return False
