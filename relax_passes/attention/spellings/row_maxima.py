"""The number that is subtracted from a row of scores before exp: its maximum, perhaps with a sink's logit or a guard.

    max(s)        max(max(s), sink)        max(concat(s, sink))
    max(max(s), number)        where(…, number, max(s))

Any such number cancels out of a softmax.  These ones are known to keep exponentials from overflowing.
"""

from dataclasses import dataclass

from tvm import relax

from relax_passes.attention.sinks.logits import Sink, column_beside, logits_of
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.floats import FLOATS
from relax_passes.ir.same_values import bare, same_numbers, uncast


@dataclass(frozen=True)
class Shift:
    """A number for each row that is subtracted from the row's scores.

    expr : these numbers, or None if nothing is subtracted
    sink : the sink whose logit is part of the maximum, or None
    is_guarded : whether the maximum is cut off below, or replaced in some rows, by a number
    largest : the largest of the numbers that cut off or replace the maximum, or 0
    """

    expr: relax.Expr | None = None
    sink: Sink | None = None
    is_guarded: bool = False
    largest: float = 0.0

    @property
    def is_maximum(self) -> bool:
        """Whether the shift is the maximum of each row of the scores, and of nothing else."""
        return self.expr is not None and self.sink is None and not self.is_guarded


def find_shift(bindings: Bindings, expr, scores) -> Shift | None:
    """The shift that `expr` (…, 1) is for `scores`, or None."""
    if is_row_maximum(bindings, expr, scores):
        return Shift(expr)
    if (sink := _sink_in_maximum(bindings, expr, scores)) is not None:
        is_number = isinstance(sink.logits, float)
        return Shift(expr, sink, is_number, max(0.0, sink.logits) if is_number else 0.0)
    numbers = guards(bindings, expr, scores)
    return None if numbers is None else Shift(expr, None, True, max([0.0, *numbers]))


def is_row_maximum(bindings: Bindings, expr, scores) -> bool:
    """Whether `expr` (…, 1) is exactly the largest of each row of `scores`."""
    shape = static_shape(scores)
    return shape is not None and static_shape(expr) == (*shape[:-1], 1) and _is_maximum(bindings, expr, scores)


def _is_maximum(bindings, expr, scores) -> bool:
    expr = uncast(bindings, bare(bindings, uncast(bindings, expr)))  # a maximum without keepdims
    value = _projected(bindings, expr)
    if operator(value) == "max":
        return reduces_last(value) and same_numbers(bindings, value.args[0], scores)
    if isinstance(value, relax.TupleGetItem) and int(value.index) == 0:
        top = bindings.value(value.tuple_value)
        if operator(top) == "topk" and int(top.attrs.k) == 1 and bool(top.attrs.largest):
            last = int(top.attrs.axis) in (-1, len(shape_of(scores)) - 1)
            return last and same_numbers(bindings, top.args[0], scores)
    return False


def _sink_in_maximum(bindings, expr, scores) -> Sink | None:
    """The sink, if `expr` is the larger of each row's maximum and the sink's logit; else None."""
    shape = static_shape(scores)
    if shape is None or static_shape(expr) != (*shape[:-1], 1):
        return None
    value = bindings.value(bare(bindings, expr))
    if operator(value) == "max" and reduces_last(value):
        return column_beside(bindings, value.args[0], scores)
    if operator(value) != "maximum" or static_shape(value) not in ((*shape[:-1], 1), shape[:-1]):
        return None
    trailing = len(shape) - len(shape_of(value))
    for top, other in (value.args, (value.args[1], value.args[0])):
        if static_shape(top) == static_shape(value) and _is_maximum(bindings, top, scores):
            return logits_of(bindings, other, shape[:-2], trailing)
    return None


def guards(bindings: Bindings, expr, scores) -> list[float] | None:
    """The numbers that a row's maximum was raised to, or replaced by in some rows; None for anything else."""
    call = bindings.value(expr)
    if operator(call) == "where":
        parts = call.args[1:]
    elif operator(call) in ("maximum", "astype"):
        parts = call.args
    else:
        return None
    numbers = [x for part in parts if (x := bindings.scalar(part)) is not None]
    parts = [x for x in parts if bindings.scalar(x) is None]
    if static_shape(call) is None or shape_of(call)[-1:] != (1,) or len(parts) != 1 or dtype_of(parts[0]) not in FLOATS:
        return None
    if is_row_maximum(bindings, parts[0], scores):
        return numbers
    inner = guards(bindings, parts[0], scores)
    return None if inner is None else [*numbers, *inner]


def reduces_last(call) -> bool:
    """Whether a reduction is over the last dimension and no other."""
    rank = len(call.args[0].ty.shape)
    axes = None if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]
    return axes == [rank - 1]


def _projected(bindings, expr):
    """What `expr` is bound to, through tuples that are built and taken apart again."""
    value = bindings.value(expr)
    while isinstance(value, relax.TupleGetItem):
        fields = bindings.value(value.tuple_value)
        if not isinstance(fields, relax.Tuple):
            break
        value = bindings.value(fields.fields[int(value.index)])
    return value
