"""Which rows of its operands an operator needs, where some rows of its result are read.

A rule takes a call and the place of the rows in its result.  It gives a slot for each operand: the place of the rows
that are needed, or None where the operand is needed whole, or has no rows.  It raises NotMoved where rows of the result
are not made of the same rows of the operands.  Rules hold for every dtype.
"""

from tvm import relax

from relax_passes.ir.bindings import SAME_ELEMENTS, operator, permutation, shape_of, static_shape
from relax_passes.parallel.rules import BINARY, NORMS, REDUCTIONS, UNARY, split_at, tensors_of
from relax_passes.read_rows.places import Digit, NotMoved, Place, Spread

Slot = Place | Spread | None

ELEMENTWISE = {
    *UNARY,
    *BINARY,
    *("where", "floor_mod", "mod", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_xor"),
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "trunc", "log_add_exp", "nn.selu"),
}


def slots_of(value, place: Place) -> list[Slot]:
    """The slot of each tensor that a value is computed from, given the place of the rows that are read of it.

    Of a field of a tuple, the tuple is the operand, and a tuple's place is that of each of its fields.
    """
    if isinstance(value, relax.TupleGetItem):
        return [place]
    name = operator(value)
    rule = RULES.get(name) or (_elementwise if name in ELEMENTWISE else None)
    if rule is None or any(static_shape(x) is None for x in tensors_of(value)):
        raise NotMoved
    return rule(value, place)


def with_operands(value, operands: list, place: Place, count: int):
    """The same operator on other operands, with `count` rows at `place` in its result."""
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(operands[0], value.index)
    if operator(value) in SAME_ELEMENTS:
        return relax.op.reshape(operands[0], place.narrowed(shape_of(value), count))
    if operator(value) == "broadcast_to":
        return relax.op.broadcast_to(operands[0], place.narrowed(shape_of(value), count))
    remaining = iter(operands)

    def one(x):
        return next(remaining) if isinstance(getattr(x, "ty", None), relax.TensorType) else x

    args = [relax.Tuple([one(y) for y in x.fields]) if isinstance(x, relax.Tuple) else one(x) for x in value.args]
    return relax.Call(value.op, args, value.attrs, value.ty_args, value.span)


def broadcast(place: Place, result: tuple[int, ...], shape: tuple[int, ...]) -> Slot:
    """The slot of an operand that broadcasts to the shape of the result."""
    lead = len(result) - len(shape)

    def has(digit: Digit) -> bool:
        axis = digit.axis - lead
        return axis >= 0 and shape[axis] != 1

    if not has(place.rows):
        return None
    rows = place.rows.moved(place.rows.axis - lead)
    if place.batch is None or has(place.batch):
        return place.moved(lambda axis: axis - lead)
    if result[place.rows.axis] != place.rows.size or result[place.batch.axis] != place.batch.size:
        raise NotMoved
    return Spread(rows, len(result), place.batch.axis, place.rows.axis)


def _elementwise(call, place: Place) -> list[Slot]:
    result = shape_of(call)
    return [broadcast(place, result, shape_of(x)) for x in tensors_of(call)]


def _same_elements(call, place: Place) -> list[Slot]:
    return [place.reshaped(shape_of(call), shape_of(call.args[0]))]


def _permute(call, place: Place) -> list[Slot]:
    return [place.moved(permutation(call).__getitem__)]


def _matmul(call, place: Place) -> list[Slot]:
    left, right, result = shape_of(call.args[0]), shape_of(call.args[1]), shape_of(call)
    rank = len(result)
    if min(len(left), len(right)) < 2 or rank - 1 in place.axes:
        raise NotMoved
    of_right = None
    if place.rows.axis < rank - 2:
        of_right = broadcast(place, result, (*right[:-2], 1, 1))
        if of_right is not None and place.batch is not None and place.batch.axis == rank - 2:
            raise NotMoved  # each row of the left operand would need a matrix of its own
    return [broadcast(place, result, (*left[:-1], result[-1])), of_right]


def _without(place: Place, axes) -> Place:
    """The place; NotMoved where a digit is along one of `axes`."""
    if place.axes & set(axes):
        raise NotMoved
    return place


def _along(axes, rank: int) -> list[int]:
    return [int(axis) % rank for axis in ([axes] if isinstance(axes, int) else axes)]


def _norm(call, place: Place) -> list[Slot]:
    _without(place, _along(call.attrs.axes, len(shape_of(call))))
    return [place, *(None for _ in tensors_of(call)[1:])]


def _softmax(call, place: Place) -> list[Slot]:
    return [_without(place, _along([call.attrs.axis], len(shape_of(call))))]


def _reduction(call, place: Place) -> list[Slot]:
    rank, axes = len(shape_of(call.args[0])), call.attrs.axis
    over = list(range(rank)) if axes is None else _along(axes, rank)
    kept = [n for n in range(rank) if n not in over or call.attrs.keepdims]
    return [_without(place.moved(kept.__getitem__), over)]


def _concat(call, place: Place) -> list[Slot]:
    _without(place, _along([call.attrs.axis], len(shape_of(call))))
    return [place for _ in tensors_of(call)]


def _split(call, place: Place) -> list[Slot]:
    return [_without(place, [split_at(call)[0]])]


def _slice(call, place: Place) -> list[Slot]:
    axes = [int(axis.value) for axis in call.args[1].fields]
    return [_without(place, _along(axes, len(shape_of(call))))]


def _take(call, place: Place) -> list[Slot]:
    if call.attrs.axis is None:
        raise NotMoved
    table, index = (shape_of(x) for x in call.args)
    axis, rank = int(call.attrs.axis) % len(table), len(index)
    _without(place, range(axis, axis + rank))
    return [place.moved(lambda n: n if n < axis else n - rank + 1), None]


RULES = {
    "permute_dims": _permute,
    "matmul": _matmul,
    "nn.softmax": _softmax,
    "nn.log_softmax": _softmax,
    "concat": _concat,
    "split": _split,
    "strided_slice": _slice,
    "take": _take,
    "broadcast_to": _elementwise,
    **dict.fromkeys(SAME_ELEMENTS, _same_elements),
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(REDUCTIONS, _reduction),
}
