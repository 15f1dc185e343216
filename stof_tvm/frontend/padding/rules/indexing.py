"""Rules of reads at places that other tensors give."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, Size, at, is_padded, length, same
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.rules.elementwise import broadcast
from stof_tvm.frontend.padding.rules.views import axis_of, operand

aten = torch.ops.aten
LARGEST = 1 << 24  # elements of places that are looked at


def _embedding(rewriter: Rewriter, node: Node) -> Value:
    """Rows of a table at places that count from 0: rows of padding for places that are padding."""
    given = rewriter.given(node)
    table, places = rewriter.compact_argument(node, [0], "weight"), rewriter.value(given["indices"])
    rewriter.set_argument(node, "indices", _harmless(rewriter, node, given["indices"], table.dims[0]))
    return Value((*places.dims, *table.dims[1:]))


def _index_select(rewriter: Rewriter, node: Node) -> Value:
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given["dim"], value)
    value = rewriter.compact_argument(node, [axis])
    rewriter.set_argument(node, "index", _inside(rewriter, node, given["index"], value.dims[axis]))
    places = rewriter.value(given["index"]).dims
    return Value((*value.dims[:axis], *(places or ((),)), *value.dims[axis + 1 :]))


def _index(rewriter: Rewriter, node: Node) -> Value:
    """x[…, places, …]."""
    value, given = operand(rewriter, node), rewriter.given(node)
    indices = list(given["indices"])
    axes = [axis for axis, places in enumerate(indices) if places is not None]
    value = rewriter.compact_argument(node, axes)
    for axis in axes:
        if indices[axis].meta["val"].dtype in (torch.bool, torch.uint8):
            raise rewriter.refuse(node, "its result has as many rows as are chosen")
        indices[axis] = _inside(rewriter, node, indices[axis], value.dims[axis])
    rewriter.set_argument(node, "indices", indices)
    places = [indices[axis] for axis in axes]
    rank = max(x.meta["val"].dim() for x in places)
    together = broadcast(rewriter, node, places, rank)
    rest: list[Dim] = [dim for axis, dim in enumerate(value.dims) if axis not in axes]
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    return Value((*rest[:first], *together, *rest[first:]))


def _gather(rewriter: Rewriter, node: Node) -> Value:
    """Elements at places along one dimension, the other coordinates those of the places."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis, places = axis_of(given["dim"], value), rewriter.value(given["index"]).dims
    if not value.dims:
        return Value(places)
    value = rewriter.compact_argument(node, [axis])
    for number, (own, dim) in enumerate(zip(value.dims, places, strict=True)):
        if number != axis and dim != () and not same(own, dim):
            raise rewriter.refuse(node, "its places have padding elsewhere than what they read from")
    rewriter.set_argument(node, "index", _inside(rewriter, node, given["index"], value.dims[axis]))
    return Value(places)


def _inside(rewriter: Rewriter, node: Node, places: Node, dim: Dim) -> Node:
    """Places in a dimension whose padding is at its end: those below 0 count from the end of what is no padding.

    A place that the smaller tensor does not have becomes one that the larger one has not, either.
    """
    size = length(dim)
    if not is_padded(dim):
        return _harmless(rewriter, node, places, dim)
    if _are_inside(rewriter, places, size):
        return places
    known = rewriter.value(places)
    places = rewriter.filled(places, known.padded, 0, node)
    number, outside = rewriter.number(size), at(size, rewriter.sizes)
    from_end = rewriter.emit(node, aten.add.Tensor, places, number)
    is_negative = rewriter.emit(node, aten.lt.Scalar, places, 0)
    counted = rewriter.emit(node, aten.where.self, is_negative, from_end, places)
    too_low = rewriter.emit(node, aten.lt.Scalar, counted, 0)
    too_high = rewriter.emit(node, aten.ge.Tensor, counted, number)
    is_outside = rewriter.emit(node, aten.logical_or.default, too_low, too_high)
    return rewriter.emit(node, aten.where.ScalarSelf, is_outside, outside, counted, value=known)


def _harmless(rewriter: Rewriter, node: Node, places: Node, dim: Dim) -> Node:
    """Places in a dimension of one size, 0 where they are padding: what is computed there may be no place at all."""
    known = rewriter.value(places)
    if places.op == "placeholder" or not known.padded or is_padded(dim):
        return places  # inputs are padded with zeros
    constant = rewriter.constant(places, LARGEST)
    if constant is not None and constant.numel() and 0 <= constant.min() and constant.max() < at(length(dim), {}):
        return places
    return rewriter.filled(places, known.padded, 0, node)


def _are_inside(rewriter: Rewriter, places: Node, size: Size) -> bool:
    """Whether places that are the same in every call are inside of a size, whatever it is in a call.

    They are below its least number, or padded as what they read from is, and none is beyond its own place: `arange`.
    A read at such places may be a constant, which one with a call's numbers cannot.
    """
    constant = rewriter.constant(places, LARGEST)
    if constant is None or not constant.numel() or constant.min() < 0:
        return False
    if constant.max() < at(size, rewriter.least):
        return True
    for axis, dim in enumerate(rewriter.value(places).dims):
        if same(dim, (size,)):
            own = torch.arange(constant.shape[axis], device=constant.device).view(
                [-1] + [1] * (constant.dim() - 1 - axis)
            )
            if bool((constant <= own).all()):
                return True
    return False


INDEXING_RULES = {
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
}
