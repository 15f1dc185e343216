"""Merge gates: two products of one input, of which one gates the other, become one product with a gate.

    f(x @ wg + bg) * (x @ wu + bu)      becomes      f(gate) * values,  where both are columns of x @ w + b

w has `GATE_COLUMNS` columns of wg, as many of wu, and so on, which is the order in which a gated product takes them
(`tir_kernels/fusion/problem.py`).  So whatever the fusion scheme makes of the operators, a kernel reads this very
weight, and engines for any numbers of rows have it in common.

Preconditions: after `CanonicalizeOperators`, which gives activations one spelling; before `PartitionSegments`; "main"
is one dataflow block.  Weights and biases are constants; where only one product has a bias, the other's is zeros, and
where only one weight is transposed, the other is transposed here.  Products are merged if

- between them and the product of both lie an activation and views of the same elements, and nothing else reads these;
- a template computes the gated product: the chooser is asked, about the merged operators as they would be;
- no other product reads one of the weights, which would be held twice then;
- no scheme is known for the operators as they are: a user's of their number, or a tuning log's that is faster than one
  that it may have for the merged operators.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.matching.chain import ACTIVATIONS
from relax_passes.fusion.merging.projection import Projection, match_projection
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.ir.rebuild import rebuild, substitute
from tir_kernels.fusion.problem import GATE_COLUMNS, GemmProblem

op = relax.op


@dataclass(frozen=True)
class Pair:
    """A gate and its values.  `path` has what is computed from their results up to f(gate) * values, in order."""

    gate: Projection
    value: Projection
    path: tuple[relax.Var, ...]

    @property
    def weights(self) -> tuple[GenericConst, GenericConst]:
        """Both weights."""
        return self.gate.weight, self.value.weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of the two products, (…, n)."""
        return shape_of(self.gate.result)

    @property
    def is_transposed(self) -> bool:
        """Whether the merged weight is (2 n, k)."""
        return self.gate.transposed or self.value.transposed

    @property
    def has_bias(self) -> bool:
        """Whether the merged product has a bias."""
        return self.gate.bias is not None or self.value.bias is not None


@tvm.transform.module_pass(opt_level=0, name="MergeGates")
class MergeGates:
    """Merge each gate of "main" with its values.

    Parameters
    ----------
    chooser : TemplateChooser
        It tells what a template computes.
    stays : callable, optional
        `stays(before, after)` tells whether the operators, an OperatorGraph, are better left as they were before.
    """

    def __init__(
        self, chooser: TemplateChooser, stays: Callable[[OperatorGraph, OperatorGraph], bool] = lambda *_: False
    ):
        self.chooser, self.stays = chooser, stays

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        pairs = self._computed(bindings, _match_pairs(bindings))
        if not pairs:
            return mod
        merged = _merge(mod, pairs)
        return mod if self.stays(OperatorGraph(mod["main"]), OperatorGraph(merged["main"])) else merged

    def _computed(self, bindings: Bindings, pairs: list[Pair]) -> list[Pair]:
        """The pairs that a template computes as one product; equal ones are tried once."""
        is_computed: dict[tuple, bool] = {}
        for pair in pairs:
            key = _structure(bindings, pair)
            if key not in is_computed:
                choice = self.chooser.choose(_trial(bindings, pair))
                problem = choice.match.problem if isinstance(choice, TemplateChoice) else None
                is_computed[key] = isinstance(problem, GemmProblem) and problem.gate is not None
        return [pair for pair in pairs if is_computed[_structure(bindings, pair)]]


# -- what is merged ------------------------------------------------------------------------------------------------


def _match_pairs(bindings: Bindings) -> list[Pair]:
    """Every gate with its values whose weights no other product reads."""
    projections = {}
    for var in bindings.values:
        if (projection := match_projection(bindings, var)) is not None:
            projections[projection.result] = projection
    found = [pair for var in bindings.values if (pair := _match_pair(bindings, projections, var)) is not None]
    uses = Counter(projection.weight for projection in projections.values())
    merged = Counter(pair.weights for pair in found)
    return [pair for pair in found if all(uses[weight] == merged[pair.weights] for weight in pair.weights)]


def _match_pair(bindings: Bindings, projections: dict, var) -> Pair | None:
    """The gate and the values whose product is bound to `var`, or None."""
    product = bindings.call(var, "multiply")
    if product is None or static_shape(product) is None:
        return None
    for gated, value in (product.args, reversed(product.args)):
        activation, views = _read_once(bindings, gated)
        call = None if activation is None else bindings.call(activation, *ACTIVATIONS)
        if call is None:
            continue
        gate, before = _read_once(bindings, call.args[0])
        other, beside = _read_once(bindings, value)
        first, second = projections.get(gate), projections.get(other)
        if first is not None and second is not None and _fit(first, second):
            on_the_way = {*before, activation, *views, *beside}
            return Pair(first, second, (*(v for v in bindings.values if v in on_the_way), var))
    return None


def _read_once(bindings: Bindings, expr) -> tuple[relax.Var | None, list[relax.Var]]:
    """(the variable whose elements `expr` has, the views of them that lead to it); None if others read any of these."""
    views: list[relax.Var] = []
    while isinstance(expr, relax.Var) and len(bindings.readers[expr]) == 1 and expr not in bindings.outputs:
        inner = bindings.same_elements(expr)
        if inner is None:
            return expr, views
        views.append(expr)
        expr = inner
    return None, views


def _fit(gate: Projection, value: Projection) -> bool:
    """Whether two projections, each of one dtype, may be one product with alternating columns."""
    shape = static_shape(gate.result)
    if shape is None or shape[-1] % GATE_COLUMNS:
        return False
    return gate.x.same_as(value.x) and static_shape(gate.x) is not None and shape == static_shape(value.result)


def _structure(bindings: Bindings, pair: Pair) -> tuple:
    """All that tells whether a template computes a pair, but for the numbers in its weights."""
    values = ((var, bindings.values[var]) for var in pair.path)
    path = tuple((operator(value), str(getattr(value, "attrs", None)), static_shape(var)) for var, value in values)
    has_bias = tuple(projection.bias is not None for projection in (pair.gate, pair.value))
    return (
        static_shape(pair.gate.x),
        pair.shape,
        dtype_of(pair.gate.result),
        pair.is_transposed,
        any(has_bias),
        path,
    )


# -- the merged product --------------------------------------------------------------------------------------------


def _merge(mod: tvm.IRModule, pairs: list[Pair]) -> tvm.IRModule:
    """The module with one product for each pair."""
    roles = {result: (pair, i) for pair in pairs for i, result in enumerate((pair.gate.result, pair.value.result))}
    halves: dict[relax.Var, list[relax.Expr]] = {}  # the result of a gate -> it and its values, of the merged product

    def replace(builder, var, new):
        if var not in roles:
            return None
        pair, i = roles[var]
        if pair.gate.result not in halves:
            halves[pair.gate.result] = _emit(builder, new(pair.gate.x), pair, *_constants(pair))
        return halves[pair.gate.result][i]

    return rebuild(mod, replace)


def _trial(bindings: Bindings, pair: Pair) -> relax.Function:
    """A function that computes one pair alone, merged, with weights of zeros."""
    builder, x = relax.BlockBuilder(), relax.Var("x", pair.gate.x.ty)
    n, k, dtype = 2 * pair.shape[-1], shape_of(x)[-1], dtype_of(x)
    weight = _zeros((n, k) if pair.is_transposed else (k, n), dtype)
    bias = _zeros((n,), dtype) if pair.has_bias else None
    with closing_blocks(builder), builder.function("segment", [x], private=True):
        with builder.dataflow():
            halves = _emit(builder, x, pair, weight, bias)
            mapping = dict(zip((pair.gate.result, pair.value.result), map(builder.emit, halves)))
            for var in pair.path[:-1]:
                mapping[var] = builder.emit(substitute(bindings.values[var], mapping))
            output = builder.emit_output(substitute(bindings.values[pair.path[-1]], mapping))
        builder.emit_func_output(output)
    return builder.finalize()["segment"]


def _emit(builder, x, pair: Pair, weight, bias) -> list[relax.Expr]:
    """The results of the gate and of its values: columns of one product, which is emitted."""
    product = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight)) if pair.is_transposed else weight))
    if bias is not None:
        product = builder.emit(op.add(product, bias))
    *rows, n = pair.shape
    parts = builder.emit(op.reshape(product, (*rows, n // GATE_COLUMNS, 2, GATE_COLUMNS)))
    axis = len(rows) + 1
    return [op.reshape(builder.emit(op.strided_slice(parts, [axis], [i], [i + 1])), pair.shape) for i in (0, 1)]


def _constants(pair: Pair) -> tuple[relax.Expr, relax.Expr | None]:
    """The weight and the bias of the merged product."""
    projections, dtype = (pair.gate, pair.value), dtype_of(pair.gate.result)
    turned = [p.transposed is not pair.is_transposed for p in projections]
    weights = [array_of(p.weight).T if is_turned else array_of(p.weight) for p, is_turned in zip(projections, turned)]
    weight = relax.const(_alternating(weights, 0 if pair.is_transposed else 1), dtype)
    if not pair.has_bias:
        return weight, None
    zeros = np.zeros(pair.shape[-1:], weights[0].dtype)
    biases = [zeros if p.bias is None else array_of(p.bias) for p in projections]
    return weight, relax.const(_alternating(biases, 0), dtype)


def _alternating(arrays: Iterable[np.ndarray], axis: int) -> np.ndarray:
    """Two arrays as one: along an axis, `GATE_COLUMNS` elements of the first, as many of the second, and so on."""
    parts = [x.reshape(*x.shape[:axis], -1, 1, GATE_COLUMNS, *x.shape[axis + 1 :]) for x in arrays]
    shape = parts[0].shape
    return np.concatenate(parts, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 3 :])


def _zeros(shape: tuple[int, ...], dtype: str) -> relax.Expr:
    return relax.const(np.zeros(shape, np.dtype(dtype)), dtype)
