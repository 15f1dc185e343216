"""Scores whose rows are heads and queries folded together, up to their softmax: a mask must meet the queries alone.

    softmax(matmul(reshape(q (B, H, Sq, D), (B, H·Sq, D)), kᵀ (B, D, Skv)))

Nothing in the scores tells their heads, but the queries do: a weight made that part of their rows, and there are as
many queries in each as keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tvm import relax

from relax_passes.attention.layouts.axes import Axis, Layout, flat, layout_of, reshaped_layout, size, undivided
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, shape_of, static_shape
from relax_passes.ir.length_origins import FEATURES, LengthOrigins

BY_ELEMENT = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "where", "astype", "negative")

op = relax.op


def is_view(call) -> bool:
    """Whether a call is a reshape or a transpose of known lengths."""
    name = operator(call)
    return name in (*SAME_ELEMENTS, "permute_dims") and None not in (static_shape(call), static_shape(call.args[0]))


def viewed(call, layout: Layout) -> Layout | None:
    """The layout of a view of a tensor that has a layout; None for anything else."""
    if not is_view(call):
        return None
    if operator(call) == "permute_dims":
        return [layout[axis] for axis in permutation(call)]
    return reshaped_layout(layout, shape_of(call))


class Traced(NamedTuple):
    """The layout of a view in the axes of what it is a view of, `root`, and the origin of each axis."""

    root: relax.Expr
    layout: Layout
    made: dict[Axis, str]


def traced_layout(bindings: Bindings, expr: relax.Expr, origins: LengthOrigins) -> Traced | None:
    """Where the dimensions of a view come from; None where that is not known."""
    way, root = [], expr
    while is_view(bindings.value(root)):
        way.append(bindings.value(root))
        root = way[-1].args[0]
    if static_shape(root) is None:
        return None
    first = layout_of(shape_of(root))
    layout: Layout | None = first
    for view in reversed(way):
        layout = None if layout is None else viewed(view, layout)
    if layout is None:
        return None
    made: dict[Axis, str] = {}
    for place, dimension in enumerate(first):
        made |= dict.fromkeys(undivided(dimension), origins.of(root, place))
    return Traced(root, layout, made)


def folded_rows(bindings: Bindings, product: relax.Var, origins: LengthOrigins):
    """(batch, rows, layout, values) of a product whose rows are heads and queries, or None.

    batch and rows are the axes of its left operand, layout has heads before queries, and values are the product and
    what is computed from it, the weights last.
    """
    call = bindings.value(product)
    traced = traced_layout(bindings, call.args[0], origins)
    if traced is None or traced.root is call.args[0]:
        return None
    layout, made = traced.layout, traced.made
    rows = undivided(layout[-2])
    if len(rows) < 2:
        return None
    heads = [axis for axis in rows if made[axis] == FEATURES]
    queries = [axis for axis in rows if made[axis] != FEATURES]
    if not heads or size(queries) != shape_of(call)[-1] or rows not in ([*heads, *queries], [*queries, *heads]):
        return None
    values = _values(bindings, product)
    return values and (flat(layout[:-2]), rows, [*layout[:-2], heads, queries, [Axis(shape_of(call)[-1])]], values)


def _values(bindings, product) -> list[relax.Var] | None:
    """The product and what is computed from it element by element up to a softmax and a product; None for others."""
    values, has_softmax = [product], False
    while values[-1] not in bindings.outputs and len(bindings.readers[values[-1]]) == 1:
        (reader,) = bindings.readers[values[-1]]
        call = bindings.value(reader)
        name, here = operator(call), values[-1]
        if name == "matmul":
            return values if has_softmax and call.args[0].same_as(here) else None
        if name == "nn.softmax" and int(call.attrs.axis) in (-1, len(shape_of(here)) - 1):
            has_softmax = True
        elif name not in BY_ELEMENT or static_shape(call) != static_shape(here):
            return None
        elif any(not x.same_as(here) and not _is_of_keys(x, shape_of(here)) for x in call.args):
            return None
        values.append(reader)
    return None


def _is_of_keys(operand, shape) -> bool:
    """Whether an operand has one number for all rows of scores of this shape."""
    given = static_shape(operand)
    return given is not None and (len(given) < 2 or given[-2] == 1) and len(given) <= len(shape)


class UnfoldedProduct(Protocol):
    """A product with heads as a dimension, in place of `product`; axes as `folded_rows` has them."""

    product: relax.Call
    batch: list[Axis]
    rows: list[Axis]
    layout: Layout

    def emit(self, emit: Callable, new: Callable) -> relax.Call:
        """The product of operands in the new function."""


@dataclass
class FoldedValue:
    """A value of folded rows, computed with heads as a dimension; `done` has those that are, by their old variables."""

    var: relax.Var
    call: relax.Call
    scores: UnfoldedProduct
    done: dict = field(repr=False)

    def emit(self, emit, new):
        """The value in its old shape, of which nothing is read if the next one is unfolded, too."""
        layout = self.scores.layout
        if self.call is self.scores.product:
            value = emit(self.scores.emit(emit, new))
        elif operator(self.call) == "nn.softmax":
            softmax = op.nn.softmax(self.done[self.call.args[0]], -1)
            value = emit(relax.Call(softmax.op, softmax.args, softmax.attrs, [], self.call.span))
        else:
            arguments = [self._operand(emit, new, x) for x in self.call.args]
            value = emit(relax.Call(self.call.op, arguments, self.call.attrs, [], self.call.span))
        self.done[self.var] = value
        axes, rows = flat(layout[:-1]), undivided(self.scores.rows)
        order = [axes.index(axis) for axis in [*undivided(self.scores.batch), *rows]]
        split = emit(op.reshape(value, [*(axis.size for axis in axes), shape_of(value)[-1]]))
        return op.reshape(emit(op.permute_dims(split, [*order, len(axes)])), shape_of(self.var))

    def _operand(self, emit, new, operand):
        if operand in self.done:
            return self.done[operand]
        given = shape_of(operand)
        if len(given) < 2:
            return new(operand)
        return emit(op.reshape(new(operand), [*given[:-2], 1, *given[-2:]]))


def unfolded_values(
    bindings: Bindings, scores: UnfoldedProduct, values: list[relax.Var]
) -> dict[relax.Var, FoldedValue]:
    """What computes each of some values with heads as a dimension."""
    done: dict = {}
    return {var: FoldedValue(var, bindings.value(var), scores, done) for var in values}
