"""Rules of reads at places that other tensors give."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, is_padded, length, same
from stof_tvm.frontend.padding.elementwise import broadcast
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.views import axis_of, operand

aten = torch.ops.aten
LARGEST = 1 << 24  # elements of places that are looked at


def _embedding(rewriter: Rewriter, node: Node) -> Value:
    """Rows of a table at places that count from 0: rows of padding for places that are padding."""
    given = rewriter.given(node)
    table, places = rewriter.compact_argument(node, [0], "weight"), rewriter.value(given["indices"])
    return Value((*places.dims, *table.dims[1:]))


def _index_select(rewriter: Rewriter, node: Node) -> Value:
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given["dim"], value)
    value = rewriter.compact_argument(node, [axis])
    places = rewriter.value(given["index"]).dims
    return Value((*value.dims[:axis], *(places or ((),)), *value.dims[axis + 1 :]))


def _index(rewriter: Rewriter, node: Node) -> Value:
    """x[…, places, …]: places below 0 count from the end of what is no padding."""
    value, given = operand(rewriter, node), rewriter.given(node)
    indices = list(given["indices"])
    axes = [axis for axis, places in enumerate(indices) if places is not None]
    value = rewriter.compact_argument(node, axes)
    for axis in axes:
        places, dim = indices[axis], value.dims[axis]
        if places.meta["val"].dtype in (torch.bool, torch.uint8):
            raise rewriter.refuse(node, "its result has as many rows as are chosen")
        if not is_padded(dim) or _counts_from_0(rewriter, places):
            continue
        known = rewriter.value(places)
        from_end = rewriter.emit(node, aten.add.Tensor, places, rewriter.number(length(dim)), value=known)
        is_negative = rewriter.emit(node, aten.lt.Scalar, places, 0, value=known)
        indices[axis] = rewriter.emit(node, aten.where.self, is_negative, from_end, places, value=known)
    rewriter.set_argument(node, "indices", indices)
    places = [indices[axis] for axis in axes]
    rank = max(x.meta["val"].dim() for x in places)
    together = broadcast(rewriter, node, places, rank)
    rest: list[Dim] = [dim for axis, dim in enumerate(value.dims) if axis not in axes]
    first = axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0
    return Value((*rest[:first], *together, *rest[first:]))


def _counts_from_0(rewriter: Rewriter, places: Node) -> bool:
    """Whether places are the same in every call, and none is below 0: then the read may be a constant, too."""
    constant = rewriter.constant(places, LARGEST)
    return constant is not None and constant.numel() > 0 and bool(constant.min() >= 0)


def _gather(rewriter: Rewriter, node: Node) -> Value:
    """Elements at places along one dimension, the other coordinates those of the places."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis, places = axis_of(given["dim"], value), rewriter.value(given["index"]).dims
    value = rewriter.compact_argument(node, [axis] if value.dims else [])
    for number, (own, dim) in enumerate(zip(value.dims, places, strict=True)):
        if number != axis and dim != () and not same(own, dim):
            raise rewriter.refuse(node, "its places have padding elsewhere than what they read from")
    return Value(places)


INDEXING_RULES = {
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.gather.default: _gather,
}
