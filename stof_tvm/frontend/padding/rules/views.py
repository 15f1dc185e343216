"""Rules of operators that move elements: views, slices, joins and repetitions."""

import sympy
import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import (
    Dim,
    Size,
    at,
    dim_of,
    is_first,
    is_negative,
    is_padded,
    joined,
    length,
    regrouped,
    same,
    same_size,
)
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.rules.elementwise import is_symbolic

aten = torch.ops.aten


def operand(rewriter: Rewriter, node: Node) -> Value:
    """What is known of a node's first argument."""
    return rewriter.value(node.args[0])  # type: ignore[arg-type]


def axis_of(axis: int, value: Value) -> int:
    """The number of a dimension that may be counted from the end."""
    return axis % max(len(value.dims), 1)


def _view(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    groups = regrouped(value.dims, rewriter.shape(node))
    if groups is None:
        before = ", ".join(str(length(dim)) for dim in value.dims)
        after = ", ".join(map(str, rewriter.shape(node)))
        raise rewriter.refuse(node, f"a view of ({before}) as ({after}) would put padding between the elements")
    fills = {}
    for axis, (dim, origins) in enumerate(groups):
        if len(origins) == 1 and (origin := next(iter(origins))) in value.fills and same(dim, value.dims[origin]):
            fills[axis] = value.fills[origin]
    return Value(tuple(dim for dim, _ in groups), fills)


def _unsqueeze(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    place = rewriter.given(node)["dim"] % (len(value.dims) + 1)
    return _moved(value, [*range(place), None, *range(place, len(value.dims))])


def _squeeze(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    given = rewriter.given(node).get("dim", list(range(len(value.dims))))
    axes = {axis_of(axis, value) for axis in ([given] if isinstance(given, int) else given)}
    return _moved(value, [n for n, dim in enumerate(value.dims) if n not in axes or dim != ()])


def _permute(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    return _moved(value, [axis_of(axis, value) for axis in rewriter.given(node)["dims"]])


def _transpose(rewriter: Rewriter, node: Node) -> Value:
    value, given = operand(rewriter, node), rewriter.given(node)
    order = list(range(len(value.dims)))
    if len(order) > 1:
        a, b = (axis_of(given.get(name, default), value) for name, default in (("dim0", 0), ("dim1", 1)))
        order[a], order[b] = order[b], order[a]
    return _moved(value, order)


def _moved(value: Value, order: list) -> Value:
    """Dimensions in another order, with new ones of size 1 for None."""
    dims = tuple(() if n is None else value.dims[n] for n in order)
    return Value(dims, {place: value.fills[n] for place, n in enumerate(order) if n in value.fills})


def _expand(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    sizes = rewriter.shape(node)
    new = len(sizes) - len(value.dims)
    dims = [
        dim_of(size) if n < new or value.dims[n - new] == () else value.dims[n - new] for n, size in enumerate(sizes)
    ]
    return Value(tuple(dims), {axis + new: fill for axis, fill in value.fills.items()})


def _repeat(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    times = rewriter.given(node)["repeats"]
    new = len(times) - len(value.dims)
    dims = [joined([n, *(value.dims[axis - new] if axis >= new else ())]) for axis, n in enumerate(times)]
    # Padding is repetitions, too, where their number depends on sizes: copies of what is no padding.
    kept = {axis + new: fill for axis, fill in value.fills.items() if not is_symbolic(times[axis + new])}
    return Value(tuple(dims), kept)


def _slice(rewriter: Rewriter, node: Node) -> Value:
    """A slice that begins at a fixed place keeps what it takes; another is gathered, from where it begins in a call."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given.get("dim", 0), value)
    dim = value.dims[axis]
    start, step = given.get("start"), given.get("step", 1)
    result = dim_of(rewriter.twins[node.name].meta["val"].shape[axis])
    start = 0 if start is None else start
    if is_symbolic(step):
        raise rewriter.refuse(node, "its step depends on sizes")
    if is_symbolic(start):
        start = _at_least_0(_from_first(rewriter, node, start, dim))
    elif not is_padded(dim):
        return _with_dim(value, axis, result)
    if start == 0 and step == 1 and same_size(rewriter.shape(node)[axis], length(dim)):
        return value
    value = rewriter.compact_argument(node, [axis])
    dim = value.dims[axis]
    if isinstance(start, int) and start >= 0:
        return _with_dim(value, axis, result)
    start = _at_least_0(length(dim) + start) if isinstance(start, int) else start
    return gathered(rewriter, node, axis, start, step, result)


def _from_first(rewriter: Rewriter, node: Node, place: Size, dim: Dim) -> Size:
    """A place that depends on sizes, counted from the first: one below 0 counts from the end of what is no padding."""
    below = is_negative(place, rewriter.least, rewriter.sizes)
    if below is None:
        raise rewriter.refuse(node, f"it counts from {place}, which is below 0 for some sizes and not for others")
    return length(dim) + place if below else place


def _at_least_0(place: Size) -> Size:
    """A place where a slice begins, which is none before the first."""
    place = sympy.Max(0, place)
    return int(place) if place.is_number else place


def gathered(rewriter: Rewriter, node: Node, axis: int, start: Size, step: int, result: Dim) -> Value:
    """Replace a node by the rows of its operand from `start` on, which is known in a call only."""
    source, value = node.args[0], operand(rewriter, node)
    assert isinstance(source, Node), "what is sliced is a tensor"
    shape, device = source.meta["val"].shape, source.meta["val"].device
    many = node.meta["val"].shape[axis]
    places = rewriter.emit(node, aten.arange.start_step, 0, many * step, step, device=device)
    places = rewriter.emit(node, aten.add.Tensor, places, rewriter.number(start))
    places = rewriter.emit(node, aten.clamp.default, places, 0, shape[axis] - 1)
    known = _with_dim(value, axis, result)
    rewriter.replace(node, rewriter.emit(node, aten.index_select.default, source, axis, places), known)
    return known


def _select(rewriter: Rewriter, node: Node) -> Value:
    """A row at a fixed place, or one that is counted from the end of what is no padding."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis, place = axis_of(given["dim"], value), given["index"]
    known = _moved(value, [n for n in range(len(value.dims)) if n != axis])
    if is_symbolic(place):
        place = sympy.sympify(_from_first(rewriter, node, place, value.dims[axis]))
        if is_negative(place, rewriter.least, rewriter.sizes) is not False:
            raise rewriter.refuse(node, f"it takes row {place}, which may be before the first")
        place = int(place) if place.is_number else place
    if isinstance(place, int) and not is_padded(value.dims[axis]):
        return known
    dim = rewriter.compact_argument(node, [axis]).dims[axis]
    if isinstance(place, int) and not -(least := at(length(dim), rewriter.least)) <= place < least:
        raise rewriter.refuse(node, f"it takes row {place} of a size that may be {least}")
    if isinstance(place, int) and place >= 0:
        return known
    place = length(dim) + place if isinstance(place, int) else place
    source = node.args[0]
    place = rewriter.emit(node, aten.view.default, rewriter.number(place), [1])
    row = rewriter.emit(node, aten.index_select.default, source, axis, place)
    rewriter.replace(node, rewriter.emit(node, aten.squeeze.dim, row, axis), known)
    return known


def _with_dim(value: Value, axis: int, dim: Dim) -> Value:
    """The value with another dimension for one, of whose padding nothing is known."""
    dims = (*value.dims[:axis], dim, *value.dims[axis + 1 :])
    return Value(dims, {n: fill for n, fill in value.fills.items() if n != axis})


def _cat(rewriter: Rewriter, node: Node) -> Value:
    """Joined tensors: padding inside of the result is left out, by gathering its rows.

    Where all have the same padding it may stay: a stack of tensors becomes a view of this result.
    """
    given = rewriter.given(node)
    parts = [x for x in given["tensors"] if x.meta["val"].dim() != 1 or x.meta["val"].numel()]
    axis = axis_of(given.get("dim", 0), rewriter.value(parts[0]))
    _same_but(rewriter, node, [rewriter.value(x).dims for x in parts], axis)
    dims = list(rewriter.value(parts[0]).dims)
    if len(parts) == 1:
        return rewriter.value(parts[0])
    first = dims[axis]
    if is_padded(first) and all(same(rewriter.value(x).dims[axis], first) for x in parts[1:]):
        dims[axis] = joined([len(parts), *first])
        return Value(tuple(dims))
    parts = [rewriter.compacted(x, axis, node) for x in parts]
    rewriter.set_argument(node, "tensors", parts)
    along = [rewriter.value(x).dims[axis] for x in parts]
    if not all(map(is_first, along)):
        raise rewriter.refuse(node, "it joins a dimension with padding inside")
    dims[axis] = dim_of(rewriter.twins[node.name].meta["val"].shape[axis])
    known = Value(tuple(dims))
    if any(map(is_padded, along[:-1])):
        joint = rewriter.emit(node, aten.cat.default, parts, axis)
        places = _places_of_joint(rewriter, node, along, [x.meta["val"].shape[axis] for x in parts])
        rewriter.replace(node, rewriter.emit(node, aten.index_select.default, joint, axis, places), known)
    return known


def _same_but(rewriter: Rewriter, node: Node, operands: list[tuple[Dim, ...]], axis: int) -> None:
    """An error where operands have padding in different places along any dimension but one."""
    first, *others = [[dim for n, dim in enumerate(dims) if n != axis] for dims in operands]
    if not all(same(a, b) for other in others for a, b in zip(first, other, strict=True)):
        raise rewriter.refuse(node, "its operands have padding in different places")


def _places_of_joint(rewriter: Rewriter, node: Node, along: list[Dim], sizes: list[int]) -> Node:
    """Where each row of a joined tensor without padding is in one with padding."""
    device, total = node.meta["val"].device, sum(sizes)
    rows = rewriter.emit(node, aten.arange.start_step, 0, total, device=device)
    places, end = rows, 0
    real_end: Size = 0
    for dim, size in zip(along[:-1], sizes[:-1], strict=True):
        end, real_end = end + size, real_end + length(dim)
        if isinstance(real_end, int):
            continue
        number = rewriter.number(real_end)
        moved = rewriter.emit(node, aten.sub.Tensor, rewriter.emit(node, aten.add.Tensor, rows, end), number)
        is_later = rewriter.emit(node, aten.ge.Tensor, rows, number)
        places = rewriter.emit(node, aten.where.self, is_later, moved, places)
    return rewriter.emit(node, aten.clamp.default, places, 0, total - 1)


def _split(rewriter: Rewriter, node: Node) -> list[Value | None]:
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given.get("dim", 0), value)
    if is_padded(value.dims[axis]) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "it splits a dimension with padding")
    shapes = [x.shape[axis] for x in rewriter.twins[node.name].meta["val"]]
    return [_with_dim(value, axis, dim_of(n)) for n in shapes]


def _pad(rewriter: Rewriter, node: Node) -> Value:
    """Rows of one value before and after: padding becomes this value, too."""
    value, given = operand(rewriter, node), rewriter.given(node)
    fill, widths = given.get("value", 0.0), given["pad"]
    if any(map(is_symbolic, [fill, *widths])):
        raise rewriter.refuse(node, "its widths depend on sizes")
    rank = len(value.dims)
    axes = [rank - 1 - n // 2 for n, width in enumerate(widths) if width]
    if any(width < 0 for width in widths):
        raise rewriter.refuse(node, "it cuts rows off, by negative widths")
    value = rewriter.compact_argument(node, axes)
    source = rewriter.filled(node.args[0], axes, fill, node, is_exact=True)  # type: ignore[arg-type]
    rewriter.set_argument(node, "self", source)
    shape = rewriter.twins[node.name].meta["val"].shape
    dims = tuple(dim_of(n) if axis in axes else value.dims[axis] for axis, n in enumerate(shape))
    return Value(dims, {axis: fill for axis in axes if is_padded(dims[axis])})


def _within(rewriter: Rewriter, node: Node) -> Value:
    """A tensor written into fixed places of another."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given["dim"], value)
    if is_padded(value.dims[axis]) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "it writes into a dimension with padding")
    source = rewriter.value(given["src"])
    own = source.dims if node.target is aten.slice_scatter.default else (*source.dims[:axis], (), *source.dims[axis:])
    _same_but(rewriter, node, [value.dims, own], axis)
    return Value(value.dims)


VIEW_RULES = {
    **dict.fromkeys([aten.view.default, aten._unsafe_view.default, aten.reshape.default], _view),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys([aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default], _squeeze),
    aten.permute.default: _permute,
    **dict.fromkeys([aten.transpose.int, aten.t.default], _transpose),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.split_with_sizes.default: _split,
    aten.constant_pad_nd.default: _pad,
    **dict.fromkeys([aten.slice_scatter.default, aten.select_scatter.default], _within),
}
