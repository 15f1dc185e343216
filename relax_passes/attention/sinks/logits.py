"""Sinks: a logit of each head that takes part in a softmax's denominator and nowhere else."""

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.spellings.steps import NotAttention, comes_from_product
from relax_passes.ir.bindings import Bindings, dtype_of, element_count, operator, shape_of, static_shape
from relax_passes.ir.floats import FLOATS, keeps_precision
from relax_passes.ir.same_values import same


@dataclass(frozen=True)
class Sink:
    """The logits of a sink: an expression with one float for each query head, in order, or one number for all heads.

    The expression may have any shape.  It has the elements of a tensor of shape `spread`, which broadcasts to `full`:
    the dimensions of the scores between batch and queries, (H,), or more where heads are grouped.
    """

    logits: relax.Expr | float
    spread: tuple[int, ...] = ()
    full: tuple[int, ...] = ()

    @property
    def is_of_heads(self) -> bool:
        """Whether heads may have different logits."""
        return math.prod(self.spread) > 1


def logits_of(bindings: Bindings, expr, lead: tuple[int, ...], trailing: int = 0) -> Sink | None:
    """The sink that `expr` spreads over batch and queries, or None if `expr` differs along these.

    `lead` are the leading dimensions of the scores, such as (B, H).  `expr` broadcasts to (*lead, rows, 1), of which it
    lacks the last `trailing` dimensions.  Raises NotAttention for a constant that is not finite.
    """
    if dtype_of(expr) not in FLOATS:
        return None
    outer, shape = expr, static_shape(expr)
    while shape is not None:
        spread = _spread(shape, lead, trailing)
        if spread is not None and (math.prod(spread) > 1 or bindings.scalar(expr) is None):
            _check_finite(bindings, expr)
            return Sink(expr, spread, lead[1:])
        call, inner = bindings.value(expr), bindings.same_elements(expr)
        if operator(call) == "broadcast_to":
            expr = call.args[0]
        elif operator(call) == "astype" and keeps_precision(dtype_of(call), dtype_of(call.args[0])):
            expr = call.args[0]
        elif inner is not None and shape == (*shape_of(inner), 1):
            trailing, expr = trailing + 1, inner
        else:
            break
        shape = static_shape(expr)
    number = bindings.scalar(outer)
    if number is None or not math.isfinite(number) or not _fits(static_shape(outer), lead):
        return None
    return Sink(float(number))


def column_beside(bindings: Bindings, expr, scores) -> Sink | None:
    """The sink that is one more column of `expr`, a concatenation with `scores` in any order or padding; else None."""
    found = taken_apart(bindings, expr)
    if found is None or not bindings.value(found[0]).same_as(bindings.value(scores)):
        return None
    return found[1]


def taken_apart(bindings: Bindings, expr) -> tuple[relax.Expr, Sink | None, bool] | None:
    """(scores, sink, whether the sink's column is the last) if `expr` is scores with one more column; else None.

    The sink is None if the column is not one number for each head.
    """
    call = bindings.value(expr)
    if static_shape(call) is None or not (rank := len(shape_of(call))):
        return None
    if operator(call) == "nn.pad":
        return _padded(call)
    if operator(call) != "concat" or call.attrs.axis is None or int(call.attrs.axis) not in (-1, rank - 1):
        return None
    parts = bindings.value(call.args[0])
    if not isinstance(parts, relax.Tuple) or len(parts.fields) != 2:
        return None
    widths = [shape_of(part)[-1] for part in parts.fields]
    if 1 not in widths:
        return None
    at_end = widths[1] == 1
    if widths == [1, 1]:  # the scores have one key
        at_end = comes_from_product(bindings, parts.fields[0])
    scores, column = parts.fields if at_end else reversed(parts.fields)
    return scores, logits_of(bindings, column, shape_of(scores)[:-2]), at_end


def _padded(call):
    widths = [int(n) for n in call.attrs.pad_width]
    value = float(call.attrs.pad_value)
    if any(widths[:-2]) or sorted(widths[-2:]) != [0, 1] or str(call.attrs.pad_mode) != "constant":
        return None
    return call.args[0], Sink(value) if math.isfinite(value) else None, widths[-1] == 1


def same_sink(bindings: Bindings, a: Sink, b: Sink) -> bool:
    """Whether two sinks are the same numbers for certain."""
    if isinstance(a.logits, float) or isinstance(b.logits, float):
        return a.logits == b.logits
    return a.spread == b.spread and same(bindings, _source(bindings, a.logits), _source(bindings, b.logits))


def _source(bindings, expr):
    """What `expr` is before reshapes and casts that lose nothing."""
    while True:
        inner = bindings.same_elements(expr)
        call = bindings.call(expr, "astype")
        if inner is None and call is not None and keeps_precision(dtype_of(call), dtype_of(call.args[0])):
            inner = call.args[0]
        if inner is None:
            return expr
        expr = inner


def _spread(shape, lead, trailing) -> tuple[int, ...] | None:
    """The dimensions of `shape` between batch and queries, as `Sink.spread`; None if others are not 1 throughout."""
    rank = len(lead) + 2 - trailing
    if len(shape) > rank:
        return None
    full = (1,) * (rank - len(shape)) + shape + (1,) * trailing
    heads = full[1 : len(lead)]
    if math.prod(full) != math.prod(heads) or any(n not in (1, m) for n, m in zip(heads, lead[1:])):
        return None
    return heads


def _fits(shape, lead) -> bool:
    return shape is not None and len(shape) <= len(lead) + 2


def _check_finite(bindings, expr):
    value = bindings.value(_source(bindings, expr))
    if isinstance(value, GenericConst) and element_count(value):
        array = value.value.numpy()
        if not np.isfinite(array.astype(np.float64)).all():
            raise NotAttention("its sink is not finite")
