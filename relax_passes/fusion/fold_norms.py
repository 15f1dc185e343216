"""Norms between matrix products, folded into them: no kernel normalises, and nothing is read or written for it.

With x the rows that a norm normalises, y its result and W what multiplies it next,

    y @ W = ((x - mean) * scale * weight + bias) @ W = scale * (x @ W') + bias @ W

where W' is W with its rows multiplied by the norm's weight and, for LayerNorm, each column's mean subtracted: that
removes the mean of every row of x from the product.  So the product that makes x gives the moments of its rows, the
next one reads W' instead of W, scales each row by one number and adds bias @ W with its own bias.  Where y is also
added to a later product, as after the norms of BERT, that product normalises it again, element by element.

A norm is folded where a product makes x, products alone read y, and their kernel is the gemm template's.  W' and the
sums of biases are computed in float32 and rounded once.
"""

from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.bindings import Bindings
from relax_passes.fusion.segment_match import SegmentMatch
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from tir_kernels.errors import StofError
from tir_kernels.fusion import gemm_cuda
from tir_kernels.fusion.problem import GemmProblem, RowProblem, Step

BIAS = Step("add", "row")


@dataclass(frozen=True)
class FromMain:
    """An input that is a variable of "main", not of the group."""

    var: relax.Var


@dataclass(frozen=True)
class MomentsOf:
    """An input that is the moments which the group bound to a variable of "main" gives."""

    producer: relax.Var


@dataclass(frozen=True)
class GroupCall:
    """A call of a group in "main": what it is bound to, what computes it, and its kernel."""

    var: relax.Var
    function: relax.Function
    arguments: tuple
    choice: TemplateChoice


class _NotFolded(Exception):
    pass


class FoldedNorms:
    """What becomes of a module's group calls when its norms are folded.

    Attributes
    ----------
    choices : dict of relax.Var to TemplateChoice
        Kernels of the groups that changed.  Inputs in their matches may be `FromMain` and `MomentsOf`.
    norms : dict of relax.Var to list of relax.Var
        The norms that need no kernel, and the calls of the groups that do their work.
    """

    def __init__(self, calls: dict[relax.Var, GroupCall], bindings: Bindings, chooser: TemplateChooser):
        self.calls, self.bindings, self.chooser = calls, bindings, chooser
        self.choices: dict[relax.Var, TemplateChoice] = {}
        self.norms: dict[relax.Var, list[relax.Var]] = {}
        for call in calls.values():
            if _is_norm(call.choice.match.problem):
                try:
                    changed = self._fold(call)
                except (_NotFolded, StofError):
                    continue
                self.choices |= changed
                self.norms[call.var] = list(changed)

    def _fold(self, norm: GroupCall) -> dict[relax.Var, TemplateChoice]:
        """New choices for the product before a norm and those after it."""
        x = self._argument(norm, norm.choice.match.inputs[0])
        producer = self._producer(x)
        problem = self._match(producer).problem
        kind = norm.choice.match.problem.norm.kind
        if (problem.m, problem.n) != _shape(norm) or problem.gives_moments not in ("", kind):
            raise _NotFolded
        changed = {}
        for reader in self._readers(norm.var):
            match = self._match(self.calls[reader])
            if match.problem.moments_step is not None:
                raise _NotFolded
            changed[reader] = self._choose(reader, _reading(match, self._places(norm, reader), norm, x, producer.var))
        if not changed:
            raise _NotFolded
        giving = replace(self._match(producer), problem=replace(problem, gives_moments=kind))
        return {producer.var: self._choose(producer.var, giving), **changed}

    def _match(self, call: GroupCall) -> SegmentMatch:
        """Of a product with the gemm template's kernel, as earlier folds have left it."""
        choice = self.choices.get(call.var, call.choice)
        if choice.template is not gemm_cuda or not _returns_result(call):
            raise _NotFolded
        return choice.match

    def _choose(self, var, match: SegmentMatch) -> TemplateChoice:
        choice = self.chooser.choose_alike(match, self.calls[var].choice)
        if choice is None:
            raise _NotFolded
        return choice

    def _producer(self, x) -> GroupCall:
        while (inner := self.bindings.same_elements(x)) is not None or isinstance(self._alias(x), relax.Var):
            x = self._alias(x) if inner is None else inner
        if x not in self.calls:
            raise _NotFolded
        return self.calls[x]

    def _alias(self, var):
        return self.bindings.values.get(var)

    def _readers(self, var) -> list[relax.Var]:
        """The group calls that read a variable of "main", through views that keep the order of elements."""
        if var in self.bindings.outputs:
            raise _NotFolded
        found = {}
        for reader in self.bindings.readers[var]:
            if reader in self.calls:
                found[reader] = None
            elif self.bindings.same_elements(reader) is not None or isinstance(self._alias(reader), relax.Var):
                found |= dict.fromkeys(self._readers(reader))
            else:
                raise _NotFolded
        return list(found)

    def _places(self, norm: GroupCall, reader: relax.Var) -> list[int]:
        """Which inputs of a reader's problem are the norm's result."""
        call, places = self.calls[reader], []
        for place, expr in enumerate(self._match(call).inputs):
            if isinstance(expr, FromMain | MomentsOf):
                continue
            try:
                var = self._argument(call, expr)
                is_read = self._producer(var).var.same_as(norm.var)
            except _NotFolded:
                continue
            if is_read:
                places.append(place)
        return places

    def _argument(self, call: GroupCall, expr) -> relax.Var:
        """The variable of "main" that an expression of a group renames the dimensions of."""
        inner = Bindings(call.function)
        while (source := inner.same_elements(expr)) is not None:
            expr = source
        for parameter, argument in zip(call.function.params, call.arguments, strict=True):
            if parameter.same_as(expr) and isinstance(argument, relax.Var):
                return argument
        raise _NotFolded


def _is_norm(problem) -> bool:
    """Whether a problem is a norm and nothing else."""
    is_row = type(problem) is RowProblem
    return is_row and problem.norm is not None and not problem.steps and not problem.keeps_sum


def _shape(norm: GroupCall) -> tuple[int, int]:
    problem = norm.choice.match.problem
    return problem.m, problem.n


def _returns_result(call: GroupCall) -> bool:
    """Whether a group returns its problem's one output, by whatever dimensions."""
    bindings, result = Bindings(call.function), call.function.body.body
    while (inner := bindings.same_elements(result)) is not None or isinstance(bindings.values.get(result), relax.Var):
        result = bindings.values[result] if inner is None else inner
    outputs = call.choice.match.outputs
    return len(outputs) == 1 and outputs[0].same_as(result)


def _reading(match: SegmentMatch, places: list[int], norm: GroupCall, x, producer) -> SegmentMatch:
    """A product that reads the norm's result once, at one of its inputs, reading x and its moments instead."""
    if len(places) != 1:
        raise _NotFolded
    problem = match.problem
    of_norm = norm.choice.match.problem.norm
    parameters = [_constant(expr) for expr in norm.choice.match.inputs[1:]]
    weight = parameters.pop(0) if of_norm.weight else np.ones(_shape(norm)[1], np.float32)
    bias = parameters.pop(0) if of_norm.bias else np.zeros(_shape(norm)[1], np.float32)
    operands = _Operands(problem, match.inputs)
    if places == [0]:
        if (problem.m, problem.k) != _shape(norm):
            raise _NotFolded
        w = _constant(match.inputs[1])
        folded, added = folded_weight(w, weight, bias, problem.w_layout, of_norm.kind == "layer_norm")
        operands.add_bias(0, added)
        operands.steps.insert(0, (Step("multiply", "moments", of_norm.eps), []))
        sources = [FromMain(x), _tensor(folded, problem.dtype)]
    else:
        at = operands.at(places[0])
        if operands.steps[at][0] != Step("add", "matrix") or (problem.m, problem.n) != _shape(norm):
            raise _NotFolded
        operands.steps[at] = Step("add", "normalized", of_norm.eps), [FromMain(x), _tensor(weight, problem.dtype)]
        operands.add_bias(at, bias)
        sources = list(match.inputs[:2])
    steps = tuple(step for step, _ in operands.steps)
    inputs = [*sources, *(x for _, exprs in operands.steps for x in exprs), MomentsOf(producer)]
    return replace(match, problem=replace(problem, steps=steps), inputs=tuple(inputs))


def folded_weight(w, weight, bias, layout: str, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """W' and bias @ W, float32, of a product's weight in its layout and a norm's weight and bias (k,)."""
    k_axis = 1 if layout == "nk" else 0
    added = w @ bias if layout == "nk" else bias @ w
    folded = w * (weight if layout == "nk" else weight[:, None])
    return folded - folded.mean(axis=k_axis, keepdims=True) if centred else folded, added


class _Operands:
    """The steps of a product, each with its operands: pairs in `steps`."""

    def __init__(self, problem: GemmProblem, inputs):
        self.dtype = problem.dtype
        rest = list(inputs[2:])
        self.steps = [(step, [rest.pop(0)] if step.operand is not None else []) for step in problem.steps]

    def at(self, place: int) -> int:
        """The step whose operand is an input of the problem."""
        with_operands = [i for i, (_, exprs) in enumerate(self.steps) if exprs]
        return with_operands[place - 2]

    def add_bias(self, at: int, values) -> None:
        """Add a vector before the step `at`: with a bias that is added next to it, or in a step of its own."""
        if not values.any():
            return
        for i in (*range(at, len(self.steps)), *range(at - 1, -1, -1)):
            between = self.steps[min(i, at) : max(i, at) + 1]
            if any(step.kind != "add" for step, _ in between):
                continue
            step, exprs = self.steps[i]
            if step == BIAS and isinstance(exprs[0], GenericConst):
                self.steps[i] = BIAS, [_tensor(_constant(exprs[0]).ravel() + values, self.dtype)]
                return
        self.steps.insert(at, (BIAS, [_tensor(values, self.dtype)]))


def _constant(expr) -> np.ndarray:
    """A constant in float32."""
    if not isinstance(expr, GenericConst):
        raise _NotFolded
    return expr.value.numpy().astype(np.float32)


def _tensor(values, dtype: str):
    """A constant in a dtype; no fold where that has no numbers so large."""
    rounded = values.astype(dtype)
    if not np.isfinite(rounded.astype(np.float32)).all():
        raise _NotFolded
    return relax.const(rounded, dtype)
