"""Rules of gathers and of counts along the tokens of a sequence."""

from dataclasses import replace

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.dims import BATCH, TOKEN, Dim, is_fixed
from stof_tvm.frontend.packing.elementwise import broadcast
from stof_tvm.frontend.packing.rewriter import ENDS, FIRST, STARTS, Rewriter, Value, arguments

aten = torch.ops.aten


def _index_select(rewriter: Rewriter, node: Node) -> Value:
    value, index = rewriter.value(arguments(node)[0]), rewriter.value(arguments(node)[2])
    axis = arguments(node)[1] % max(len(value.dims), 1)
    if not is_fixed(value.dims[axis]) or index.is_sequence or index.coordinate == BATCH:
        raise rewriter.refuse(node, "it takes some of the tokens or sequences")
    if value.is_sequence and TOKEN in index.dims[0]:
        raise rewriter.refuse(node, "it joins values of sequences with values of tokens")
    dims = (*value.dims[:axis], index.dims[0], *value.dims[axis + 1 :])
    return rewriter.result(node, rewriter.same(node), dims, is_sequence=value.is_sequence)


def _gather(rewriter: Rewriter, node: Node) -> Value:
    """gather(table, axis, index): of features, or of a table that all tokens share."""
    value, index = rewriter.value(arguments(node)[0]), rewriter.value(arguments(node)[2])
    axis = arguments(node)[1] % max(len(value.dims), 1)
    if not is_fixed(value.dims[axis]) or value.role or BATCH in (value.coordinate, index.coordinate):
        raise rewriter.refuse(node, "it takes some of the tokens or sequences")
    for n, (own, other) in enumerate(zip(value.dims, index.dims)):
        is_shared = own == (BATCH,) and not value.is_sequence and not index.is_sequence
        if n != axis and own != other and not (is_shared and other == ()) and not (is_fixed(own) and is_fixed(other)):
            raise rewriter.refuse(node, f"its operands are not alike along dimension {n}")
    if value.is_sequence != index.is_sequence and (value.is_sequence or any(BATCH in dim for dim in value.dims)):
        raise rewriter.refuse(node, "it joins values of sequences with others")
    return rewriter.result(node, rewriter.same(node), index.dims, is_sequence=index.is_sequence)


def _index(rewriter: Rewriter, node: Node) -> Value:
    """x[i, j, …]: of a table, at a place of each sequence, or of each element's own place in another order."""
    value, given = rewriter.value(arguments(node)[0]), rewriter.given(node)
    indices = list(given["indices"])
    while indices and indices[-1] is None:
        indices.pop()
    if any(index is None for index in indices):
        raise rewriter.refuse(node, "it indexes dimensions after others that it does not")
    own = [rewriter.value(index) for index in indices]
    indexed, rest = value.dims[: len(own)], value.dims[len(own) :]
    if any(index.node.meta["val"].dtype == torch.bool for index in own):
        raise rewriter.refuse(node, "it indexes by a mask")
    if all(map(is_fixed, indexed)) and not value.is_sequence and not any(x.coordinate == BATCH for x in own):
        rank = max(len(x.dims) for x in own)
        dims, spread = broadcast(rewriter, node, dict(zip(indices, own)), rank)
        if any(x.is_sequence for x in own) and any(TOKEN in dim for dim in (*dims, *rest)):
            raise rewriter.refuse(node, "it joins values of sequences with values of tokens")
        is_sequence = any(x.is_sequence for x in spread.values())
        return rewriter.result(node, rewriter.same(node), (*dims, *rest), is_sequence=is_sequence)
    if all(x.coordinate and dim == (x.coordinate,) and _is_line(x) for x, dim in zip(own, indexed)):
        return _in_another_order(rewriter, node, value, own)
    is_place = len(own) == 2 and indexed == ((BATCH,), (TOKEN,)) and own[0].coordinate == BATCH
    if is_place and not own[1].tokens and own[0].dims == own[1].dims == ((BATCH,),) and not value.is_pair:
        return _one_place(rewriter, node, value, own[1])
    raise rewriter.refuse(node, "it takes some of the tokens or sequences")


def _is_line(value: Value) -> bool:
    """Whether a value has one dimension that is more than 1."""
    return sum(dim != () for dim in value.dims) == 1


def _in_another_order(rewriter: Rewriter, node: Node, value: Value, own: list[Value]) -> Value:
    """x[batch, place], with the elements' own numbers: the same elements, their dimensions moved."""
    rank = max(len(x.dims) for x in own)
    places = []
    for x in own:
        (axis,) = [n for n, dim in enumerate(x.dims, start=rank - len(x.dims)) if dim]
        places.append(axis)
    if len(set(places)) < len(places):
        raise rewriter.refuse(node, "it takes a diagonal")
    dims: list[Dim] = [()] * rank
    for axis, dim in zip(places, value.dims):
        dims[axis] = dim
    count = len(own)
    order = [*sorted(range(count), key=places.__getitem__), *range(count, len(value.dims))]
    new = value.node if order == sorted(order) else rewriter.emit(node, aten.permute.default, value.node, order)
    for axis in range(rank):
        if axis not in places:
            new = rewriter.emit(node, aten.unsqueeze.default, new, axis)
    moved = replace(value, node=new, dims=(*dims, *value.dims[count:]), coordinate="")
    rewriter.check(node, moved)
    return moved


def _one_place(rewriter: Rewriter, node: Node, value: Value, place: Value) -> Value:
    """x[batch, place of each sequence]; a negative place counts from the sequence's end."""
    starts, ends = rewriter.input(STARTS), rewriter.input(ENDS)
    place = rewriter.of_sequences(node, place)
    is_negative = rewriter.emit(node, aten.lt.Scalar, place.node, 0)
    after = rewriter.emit(node, aten.add.Tensor, ends, 1)
    base = rewriter.emit(node, aten.where.self, is_negative, after, starts)
    at = rewriter.emit(node, aten.add.Tensor, base, place.node)
    at = rewriter.emit(node, aten.minimum.default, rewriter.emit(node, aten.maximum.default, at, starts), ends)
    row = rewriter.emit(node, aten.squeeze.dims, value.node, [0])
    new = rewriter.emit(node, aten.index_select.default, row, 0, at)
    more = {STARTS, ENDS}
    return rewriter.result(
        node, new, ((BATCH,), *value.dims[2:]), is_sequence=True, origins=rewriter.origins(node) | more
    )


def _cumsum(rewriter: Rewriter, node: Node) -> Value:
    """Sums of features; of integers along tokens, too: what comes before the sequence is taken off exactly."""
    value, given = rewriter.value(arguments(node)[0]), rewriter.given(node)
    axis = given["dim"] % max(len(value.dims), 1)
    if is_fixed(value.dims[axis]):
        return rewriter.result(node, rewriter.same(node), value.dims, is_sequence=value.is_sequence)
    dtype = node.meta["val"].dtype
    if value.dims[axis] != (TOKEN,) or value.is_pair or dtype.is_floating_point or value.coordinate:
        raise rewriter.refuse(node, "it goes over tokens or sequences")
    x = rewriter.emit(node, aten._to_copy.default, value.node, dtype=dtype)
    total = rewriter.same(node)
    before = rewriter.emit(node, aten.sub.Tensor, total, x)
    before = rewriter.emit(node, aten.index_select.default, before, axis, rewriter.input(FIRST))
    new = rewriter.emit(node, aten.sub.Tensor, total, before)
    return rewriter.result(node, new, value.dims, origins=value.origins | {FIRST})


INDEX_RULES = {
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.index.Tensor: _index,
    aten.cumsum.default: _cumsum,
}
