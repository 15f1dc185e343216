"""What each operator makes of a divided operand, and what operands a divided result needs.

A rule gets a call, one of its slots and the Shard there; a slot is the number of an operand, or RESULT.  It returns the
Shard of every slot, None for those that stay whole.  PARTIAL in RESULT's place says that every rank has a term of a
sum, GATHERED that it has some of the columns, and NotShardable that there is no such division.  A rule says what
follows, not what pays.
"""

from typing import Any

import tvm
from tvm import relax

from relax_passes.attention.composite import AttentionCall
from relax_passes.ir.bindings import SAME_ELEMENTS, operator, permutation, shape_of, static_shape
from relax_passes.parallel.placement import NotShardable, Shard, reshaped

RESULT = "result"
PARTIAL = "partial"
GATHERED = "gathered"
Slot = int | str
Slots = dict[Slot, Any]  # a Shard, None, PARTIAL or GATHERED

UNARY = (
    *("abs", "astype", "ceil", "clip", "cos", "erf", "exp", "floor", "isfinite", "isinf", "isnan", "log", "negative"),
    *("logical_not", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.relu6", "nn.silu", "nn.softplus"),
    *("round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tan", "tanh"),
)
BINARY = (
    *("add", "divide", "equal", "floor_divide", "greater", "greater_equal", "less", "less_equal", "logical_and"),
    *("logical_or", "maximum", "minimum", "multiply", "not_equal", "power", "subtract"),
)
ELEMENTWISE = {*UNARY, *BINARY, "where", "broadcast_to"}
REDUCTIONS = {"sum", "mean", "max", "min", "prod"}
NORMS = {"nn.layer_norm", "nn.rms_norm"}


def tensors_of(call: relax.Call) -> list:
    """The operands of a call that are tensors, with each tuple of tensors replaced by its fields."""
    given = [x for arg in call.args for x in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return [x for x in given if isinstance(getattr(x, "ty", None), relax.TensorType | relax.TupleType)]


def slots_of(call, slot: Slot, shard: Shard, count: int) -> Slots:
    """All slots of a value that is bound, given the Shard of one of them, for `count` ranks.

    A value that is a TupleGetItem has one operand, the tuple; a tuple's Shard is that of what it was split from.
    """
    name = operator(call)
    if isinstance(call, relax.TupleGetItem):
        raise NotShardable("a field of a tuple is not divided by itself")
    if not name:
        raise NotShardable("no rule divides what reads it")
    if any(isinstance(x.ty, relax.TupleType) or static_shape(x) is None for x in tensors_of(call)):
        raise NotShardable(f"{name} reads a tuple, or a symbolic length")
    if name in ELEMENTWISE:
        slots = _elementwise(call, slot, shard)
    elif name in SAME_ELEMENTS:
        slots = _same_elements(call, slot, shard, count)
    elif (rule := RULES.get(name)) is not None:
        slots = rule(call, slot, shard)
    else:
        raise NotShardable(f"no rule divides {name}")
    return slots


def attention_slots(call: AttentionCall, count: int) -> Slots:
    """The slots of an attention that is divided by its heads."""
    heads, kv_heads = shape_of(call.q)[1], shape_of(call.k)[1]
    if heads % count or kv_heads % count and kv_heads != 1:
        kinds = f"{heads} heads" if heads == kv_heads else f"{heads} heads with {kv_heads} of keys and values"
        raise NotShardable(f"{count} ranks do not divide {kinds}")
    of_queries = Shard(1, (heads,))
    of_keys = None if kv_heads == 1 else Shard(1, (kv_heads,))
    found: list[Shard | None] = [of_queries, of_keys, of_keys]
    for operand in (call.mask, call.bias):
        if operand is not None:
            found.append(None if shape_of(operand)[1] == 1 else of_queries)
    if call.sink is not None:
        found.append(Shard(0, (heads,)))
    if call.positions is not None:
        found.append(None)
    return {**dict(enumerate(found)), RESULT: of_queries}


def scatter_slots(call: relax.Call, slot: Slot, shard: Shard) -> Slots:
    """The slots of a call of a scatter's kernel on (x, index, update), all with three axes: rows are along axis 1."""
    if shard.axis == 1:
        raise NotShardable("a scatter is along what the ranks divide")
    shapes = [shape_of(x) for x in tensors_of(call)]
    if not isinstance(slot, str) and shapes[slot][shard.axis] == 1:
        raise NotShardable("a scatter reads it for all")
    return {RESULT: shard, **{n: None if shape[shard.axis] == 1 else shard for n, shape in enumerate(shapes)}}


def split_slots(call: relax.Call, shard: Shard, index: int) -> Shard:
    """The Shard of field `index` of a split, given that of what is split."""
    axis, starts = split_at(call)
    return shard if axis != shard.axis else shard.part(*starts[index])


def split_at(call: relax.Call) -> tuple[int, list[tuple[int, int]]]:
    """(axis, (first, end) of each field) of a split."""
    shape = shape_of(call.args[0])
    axis = int(call.attrs.axis) % len(shape)
    sizes = [static_shape_of_type(field)[axis] for field in call.ty.fields]
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return axis, list(zip(starts, starts[1:]))


def static_shape_of_type(ty) -> tuple[int, ...]:
    """The lengths of a tensor's type, which are numbers."""
    return tuple(int(n) for n in ty.shape)


def sliced_at(call: relax.Call) -> dict[int, tuple[int, int, int]]:
    """{axis: (first, end, step)} of a strided_slice whose numbers are known and positive."""
    shape = shape_of(call.args[0])
    fields = [[_number(x) for x in arg.fields] for arg in call.args[1:]]
    axes, begins, ends = fields[:3]
    steps = fields[3] if len(fields) > 3 else [1] * len(axes)
    found = {}
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        n = shape[axis]
        begin, end = (min(max(x + n if x < 0 else x, 0), n) for x in (begin, end))
        if step < 1:
            raise NotShardable("a slice goes backwards")
        found[axis % len(shape)] = begin, end, step
    return {axis: x for axis, x in found.items() if x != (0, shape[axis], 1)}


def _number(expr) -> int:
    value = getattr(expr, "value", None)
    if isinstance(value, tvm.tirx.IntImm):
        value = value.value
    if not isinstance(value, int):
        raise NotShardable("a slice begins or ends at a number that is not known")
    return value


def _elementwise(call, slot, shard) -> Slots:
    result = shape_of(call)
    shapes = [shape_of(x) for x in tensors_of(call)]
    rank = len(result if isinstance(slot, str) else shapes[slot])
    from_end = rank - shard.axis
    slots: Slots = {RESULT: shard.moved(len(result) - from_end)}
    for number, shape in enumerate(shapes):
        axis = len(shape) - from_end
        slots[number] = None if axis < 0 or shape[axis] == 1 else shard.moved(axis)
    return slots


def _same_elements(call, slot, shard, count) -> Slots:
    old, new = shape_of(call.args[0]), shape_of(call)
    if slot == RESULT:
        return {0: reshaped(shard, new, old, count), RESULT: shard}
    return {0: shard, RESULT: reshaped(shard, old, new, count)}


def _permute(call, slot, shard) -> Slots:
    axes = permutation(call)
    if slot == RESULT:
        return {0: shard.moved(axes[shard.axis]), RESULT: shard}
    return {0: shard, RESULT: shard.moved(axes.index(shard.axis))}


def _matmul(call, slot, shard) -> Slots:
    x, w, result = shape_of(call.args[0]), shape_of(call.args[1]), shape_of(call)
    if len(x) < 2 or len(w) < 2:
        raise NotShardable("no rule divides a product with a vector")
    from_end = len({0: x, 1: w, RESULT: result}[slot]) - shard.axis
    if from_end > 2:
        return _of_batches(shard, from_end, x, w, result)
    if slot == RESULT:
        is_sum, number = False, 1 if from_end == 1 else 0
    else:
        is_sum, number = (from_end == 1) == (slot == 0), slot
    if is_sum:
        return {0: shard.moved(len(x) - 1), 1: shard.moved(len(w) - 2), RESULT: PARTIAL}
    own = shard.moved(len((x, w)[number]) - (2 if number == 0 else 1))
    return {number: own, 1 - number: None, RESULT: shard.moved(len(result) - (2 if number == 0 else 1))}


def _of_batches(shard, from_end, x, w, result) -> Slots:
    slots: Slots = {RESULT: shard.moved(len(result) - from_end)}
    for number, shape in enumerate((x, w)):
        axis = len(shape) - from_end
        slots[number] = None if axis < 0 or shape[axis] == 1 else shard.moved(axis)
    return slots


def _along(axes, rank: int) -> set[int]:
    return {int(axis) % rank for axis in axes}


def _norm(call, slot, shard) -> Slots:
    tensors = tensors_of(call)
    if shard.axis in _along(call.attrs.axes, len(shape_of(call))) or slot not in (0, RESULT):
        raise NotShardable("a norm is over what the ranks would divide")
    return {0: shard, **{n: None for n in range(1, len(tensors))}, RESULT: shard}


def _softmax(call, slot, shard) -> Slots:
    if shard.axis in _along([call.attrs.axis], len(shape_of(call))):
        raise NotShardable("a softmax is over what the ranks would divide")
    return {0: shard, RESULT: shard}


def _reduction(call, slot, shard) -> Slots:
    rank = len(shape_of(call.args[0]))
    axes = set(range(rank)) if call.attrs.axis is None else _along(call.attrs.axis, rank)
    kept = [n for n in range(rank) if n not in axes or call.attrs.keepdims]
    axis = kept[shard.axis] if slot == RESULT else shard.axis
    if axis in axes:
        raise NotShardable("a reduction is over what the ranks would divide")
    return {0: shard.moved(axis), RESULT: shard.moved(kept.index(axis))}


def _concat(call, slot, shard) -> Slots:
    tensors = tensors_of(call)
    if shard.axis == int(call.attrs.axis) % len(shape_of(call)):
        raise NotShardable("a concatenation is along what the ranks would divide")
    return {**dict.fromkeys(range(len(tensors)), shard), RESULT: shard}


def _slice(call, slot, shard) -> Slots:
    if shard.axis not in (taken := sliced_at(call)):
        return {0: shard, RESULT: shard}
    first, end, step = taken[shard.axis]
    if step != 1:
        raise NotShardable("a slice leaves out what the ranks divide")
    if slot == 0:
        return {0: shard, RESULT: shard.part(first, end)}
    rest = shape_of(call.args[0])[shard.axis] - end
    sizes = [*([first] if first else []), *shard.sizes, *([rest] if rest else [])]
    return {0: Shard(shard.axis, tuple(sizes)), RESULT: shard}


def _take(call, slot, shard) -> Slots:
    rank, of_index = len(shape_of(call.args[0])), len(shape_of(call.args[1]))
    if call.attrs.axis is None or slot == 1:
        raise NotShardable("an index says what is taken")
    at = int(call.attrs.axis) % rank
    if shard.axis in (range(at, at + of_index) if slot == RESULT else (at,)):
        raise NotShardable("rows are taken along what the ranks would divide")
    more = of_index - 1
    own = shard.axis - (more if slot == RESULT and shard.axis >= at + of_index else 0)
    return {0: shard.moved(own), 1: None, RESULT: shard.moved(own + (more if own > at else 0))}


RULES = {
    "permute_dims": _permute,
    "matmul": _matmul,
    "nn.softmax": _softmax,
    "concat": _concat,
    "strided_slice": _slice,
    "take": _take,
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(REDUCTIONS, _reduction),
}
