"""Rules of operators that move elements: views, slices, joins and repetitions."""

import operator
from dataclasses import replace

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.dims import BATCH, TOKEN, Dim, is_fixed, joined, regrouped
from stof_tvm.frontend.packing.rewriter import ENDS, PLACE, STARTS, Rewriter, Value, arguments

aten = torch.ops.aten


def _operand(rewriter: Rewriter, node: Node) -> Value:
    return rewriter.value(arguments(node)[0])


def _axis(axis: int, value: Value, more: int = 0) -> int:
    return axis % max(len(value.dims) + more, 1)


def _moved(rewriter: Rewriter, node: Node, new: Node, dims, value: Value) -> Value:
    """The operand's elements in other places."""
    if value.role and tuple(dims[-2:]) != ((TOKEN,), (TOKEN,)):
        raise rewriter.refuse(node, "it moves the weights of an attention")
    value = replace(value, node=new, dims=tuple(dims))
    rewriter.check(node, value)
    return value


def _view(rewriter: Rewriter, node: Node) -> Value:
    value = _operand(rewriter, node)
    dims = regrouped(value.dims, rewriter.sizes(node))
    if dims is None:
        raise rewriter.refuse(node, "a view takes the batch or the tokens apart")
    new, shape = value.node, rewriter.shape(dims, value.is_sequence)
    strided = new.meta["val"]
    if not strided.is_contiguous():  # a view of the given program's strides may be none of these
        new = rewriter.emit(node, aten.clone.default, new, memory_format=torch.contiguous_format)
    return _moved(rewriter, node, rewriter.emit(node, aten.view.default, new, shape), dims, value)


def _unsqueeze(rewriter: Rewriter, node: Node) -> Value:
    value = _operand(rewriter, node)
    axis = _axis(arguments(node)[1], value, 1)
    return _moved(rewriter, node, rewriter.same(node), [*value.dims[:axis], (), *value.dims[axis:]], value)


def _squeeze(rewriter: Rewriter, node: Node) -> Value:
    """The dimensions that have size 1 in the given program: BATCH has it on a row of tokens, too."""
    value = _operand(rewriter, node)
    given = rewriter.given(node).get("dim", list(range(len(value.dims))))
    chosen = {_axis(axis, value) for axis in ([given] if isinstance(given, int) else given)}
    gone = sorted(axis for axis in chosen if value.dims[axis] == ())
    new = rewriter.emit(node, aten.squeeze.dims, value.node, gone)
    return _moved(rewriter, node, new, [dim for axis, dim in enumerate(value.dims) if axis not in gone], value)


def _permute(rewriter: Rewriter, node: Node) -> Value:
    value = _operand(rewriter, node)
    order = [_axis(axis, value) for axis in arguments(node)[1]]
    return _moved(rewriter, node, rewriter.same(node), [value.dims[axis] for axis in order], value)


def _transpose(rewriter: Rewriter, node: Node) -> Value:
    value = _operand(rewriter, node)
    order = list(range(len(value.dims)))
    a, b = (0, -1) if node.target is aten.t.default else (_axis(axis, value) for axis in arguments(node)[1:3])
    if order:
        order[a], order[b] = order[b], order[a]
    return _moved(rewriter, node, rewriter.same(node), [value.dims[axis] for axis in order], value)


def _expand(rewriter: Rewriter, node: Node) -> Value:
    """A dimension that becomes BATCH is shared by all sequences."""
    value = _operand(rewriter, node)
    sizes = rewriter.sizes(node)
    old = [*[()] * (len(sizes) - len(value.dims)), *value.dims]
    dims: list[Dim] = []
    for dim, (number, symbols) in zip(old, sizes):
        if dim == () and number > 1 and symbols.total():
            raise rewriter.refuse(node, "a new dimension joins the batch with others")
        dims.append(dim or (*symbols.elements(), *([number] if number > 1 else [])))
    new = rewriter.emit(node, aten.expand.default, value.node, rewriter.shape(dims, value.is_sequence))
    return _moved(rewriter, node, new, dims, replace(value, coordinate=_spread(value)))


def _spread(value: Value) -> str:
    """The coordinate of a value that is repeated: a number in the batch remains one that no result may depend on."""
    return BATCH if value.coordinate == BATCH else ""


def _repeat(rewriter: Rewriter, node: Node) -> Value:
    """Repeats dimensions a fixed number of times, and those of size 1 as often as there are tokens or sequences."""
    value, repeats = _operand(rewriter, node), rewriter.given(node)["repeats"]
    old = [*[()] * (len(repeats) - len(value.dims)), *value.dims]
    if any(isinstance(n, Node) and dim != () for n, dim in zip(repeats, old)):
        raise rewriter.refuse(node, "it repeats features as often as there are tokens")
    dims: list[Dim] = []
    for n, dim, (number, symbols) in zip(repeats, old, rewriter.sizes(node)):
        dims.append(joined([*symbols.elements(), number]) if isinstance(n, Node) else joined([n, *dim]))
    times = [rewriter.size(dim, False) if isinstance(n, Node) else n for n, dim in zip(repeats, dims)]
    return _moved(rewriter, node, rewriter.same(node, repeats=times), dims, replace(value, coordinate=_spread(value)))


def _slice(rewriter: Rewriter, node: Node) -> Value:
    value, given = _operand(rewriter, node), rewriter.given(node)
    axis = _axis(given.get("dim") or 0, value)
    dim, (number, symbols) = value.dims[axis], rewriter.sizes(node)[axis]
    start = given.get("start") or 0
    step = given.get("step") or 1
    same_size = number == rewriter.size(tuple(x for x in dim if isinstance(x, int)), False)
    if same_size and all(symbols[x] == dim.count(x) for x in (BATCH, TOKEN)) and step == 1 and start == 0:
        return value  # all of it
    if is_fixed(dim) and not symbols.total():
        if rewriter.has_sizes(node):
            raise rewriter.refuse(node, "what it takes depends on the length of the batch")
        return _moved(rewriter, node, rewriter.same(node), _with_dim(value, axis, joined([number])), value)
    if is_fixed(dim) and symbols == {TOKEN: 1} and number == 1 and step == 1 and isinstance(start, int) and start >= 0:
        return of_positions(rewriter, node, value, axis, start)
    if dim == (TOKEN,) and not symbols.total() and number == 1 and step == 1 and start in (0, -1):
        return one_token(rewriter, node, axis, STARTS if start == 0 else ENDS)
    raise rewriter.refuse(node, "it takes some of the tokens or sequences")


def of_positions(rewriter: Rewriter, node: Node, table: Value, axis: int, start: int) -> Value:
    """The rows of a table for the position of each token, from row `start` on."""
    if table.is_sequence or not table.origins <= {PLACE}:
        raise rewriter.refuse(node, "it takes as many features as there are tokens")
    place = rewriter.input(PLACE)
    if start:
        place = rewriter.emit(node, aten.add.Tensor, place, start)
    new = rewriter.emit(node, aten.index_select.default, table.node, axis, place)
    dims = _with_dim(table, axis, (TOKEN,))
    return rewriter.result(node, new, dims, origins=table.origins | {PLACE})


def one_token(rewriter: Rewriter, node: Node, axis: int, which: str) -> Value:
    """The first or the last token of each sequence; the dimension of tokens stays, with size 1."""
    value = _operand(rewriter, node)
    batch = [n for n, dim in enumerate(value.dims) if dim == (BATCH,)]
    if len(batch) != 1 or value.is_pair:
        raise rewriter.refuse(node, "it takes one token of a value that is not one of a batch's tokens")
    new = rewriter.emit(node, aten.index_select.default, value.node, axis, rewriter.input(which))
    order = list(range(len(value.dims)))
    order[axis], order[batch[0]] = order[batch[0]], order[axis]
    new = rewriter.emit(node, aten.permute.default, new, order)
    return Value(new, _with_dim(value, axis, ()), True, value.origins | {which})


def _select(rewriter: Rewriter, node: Node) -> Value:
    value = _operand(rewriter, node)
    axis, place = _axis(arguments(node)[1], value), arguments(node)[2]
    dim, rest = value.dims[axis], [*value.dims[:axis], *value.dims[axis + 1 :]]
    if is_fixed(dim) and isinstance(place, int):
        return _moved(rewriter, node, rewriter.same(node), rest, value)
    if dim == (TOKEN,) and place in (0, -1):
        one = one_token(rewriter, node, axis, STARTS if place == 0 else ENDS)
        new = rewriter.emit(node, aten.squeeze.dims, one.node, [axis])
        return rewriter.result(node, new, rest, is_sequence=True, origins=one.origins)
    raise rewriter.refuse(node, "it takes some of the tokens or sequences")


def _split(rewriter: Rewriter, node: Node) -> list[Value]:
    value, given = _operand(rewriter, node), rewriter.given(node)
    axis = _axis(given.get("dim") or 0, value)
    if not is_fixed(value.dims[axis]) or rewriter.has_sizes(node):
        raise rewriter.refuse(node, "it takes some of the tokens or sequences")
    new, parts = rewriter.same(node), []
    for number, result in enumerate(new.meta["val"]):
        part = rewriter.graph.call_function(operator.getitem, (new, number))
        part.meta.update({**new.meta, "val": result})
        parts.append(
            Value(part, _with_dim(value, axis, joined([result.shape[axis]])), value.is_sequence, value.origins)
        )
        rewriter.check(node, parts[-1], node.meta["val"][number])
    return parts


def _cat(rewriter: Rewriter, node: Node) -> Value:
    given = rewriter.given(node)
    operands = given["tensors"]
    values = [rewriter.value(x) for x in operands]
    axis = _axis(given.get("dim") or 0, values[0])
    if not all(is_fixed(x.dims[axis]) for x in values):
        raise rewriter.refuse(node, "it adds tokens to the sequences")
    dims = _with_dim(values[0], axis, joined([sum(rewriter.size(x.dims[axis], False) for x in values)]))
    if any(x.dims[:axis] != dims[:axis] or x.dims[axis + 1 :] != tuple(dims[axis + 1 :]) for x in values):
        raise rewriter.refuse(node, "its operands are not alike")
    is_sequence = any(x.is_sequence for x in values)
    if is_sequence:
        values = [rewriter.of_sequences(node, x) for x in values]
    new = rewriter.emit(node, node.target, [x.node for x in values], axis)
    return rewriter.result(node, new, dims, is_sequence=is_sequence)


def _triangle(rewriter: Rewriter, node: Node) -> Value:
    """The pairs before or after a diagonal: inside a sequence positions differ as places on the row do."""
    value = _operand(rewriter, node)
    if value.dims[-2:] != ((TOKEN,), (TOKEN,)) and not all(map(is_fixed, value.dims[-2:])):
        raise rewriter.refuse(node, "it keeps some of the tokens")
    more = {PLACE} if value.tokens else set()
    return rewriter.result(node, rewriter.same(node), value.dims, origins=value.origins | more)


def _with_dim(value: Value, axis: int, dim: Dim) -> tuple[Dim, ...]:
    return (*value.dims[:axis], dim, *value.dims[axis + 1 :])


VIEW_RULES = {
    **dict.fromkeys([aten.view.default, aten.reshape.default, aten._unsafe_view.default], _view),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], _squeeze),
    aten.permute.default: _permute,
    **dict.fromkeys([aten.transpose.int, aten.t.default], _transpose),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    **dict.fromkeys([aten.tril.default, aten.triu.default], _triangle),
}
