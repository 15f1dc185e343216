"""Rules of operators that compute every row by itself: rows of padding stay rows of padding."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, is_padded
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.rules.views import axis_of, operand

aten = torch.ops.aten


def _layer_norm(rewriter: Rewriter, node: Node):
    """Norms over the last dimensions."""
    value, given = operand(rewriter, node), rewriter.given(node)
    many = len(given["normalized_shape"])
    if any(map(is_padded, value.dims[len(value.dims) - many :])) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "it normalizes over padding")
    known = Value(value.dims)
    if not isinstance(node.meta["val"], tuple | list):
        return known
    moments = Value((*value.dims[: len(value.dims) - many], *[()] * many))
    return [known, moments, moments]


def _along(rewriter: Rewriter, node: Node):
    """Sorts and the like, of rows along one dimension."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given.get("dim", -1), value)
    if is_padded(value.dims[axis]) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "it moves elements along a dimension with padding")
    results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    found = []
    for result in results:
        dim: Dim = () if result.shape[axis] == 1 else (result.shape[axis],)
        found.append(Value((*value.dims[:axis], dim, *value.dims[axis + 1 :])))
    return found if isinstance(node.meta["val"], tuple | list) else found[0]


def _flip(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    axes = rewriter.given(node)["dims"] or range(len(value.dims))
    if any(is_padded(value.dims[axis_of(axis, value)]) for axis in axes) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "it moves elements along a dimension with padding")
    return Value(value.dims)


def _group_norm(rewriter: Rewriter, node: Node) -> list[Value | None]:
    """native_group_norm: x (N, C, *) of which N may be padded."""
    value = operand(rewriter, node)
    if any(map(is_padded, value.dims[1:])):
        raise rewriter.refuse(node, "it normalizes over padding")
    return [Value(value.dims), None, None]


def _batch_norm(rewriter: Rewriter, node: Node) -> list[Value | None]:
    """Norms by a model's own statistics: a factor and a bias of each channel."""
    value = operand(rewriter, node)
    if is_padded(value.dims[1]):
        raise rewriter.refuse(node, "its channels have padding")
    return [Value(value.dims), None, None]


ROW_RULES = {
    **dict.fromkeys([aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default], _layer_norm),
    **dict.fromkeys([aten.sort.default, aten.sort.stable, aten.topk.default], _along),
    **dict.fromkeys([aten.flip.default, aten.roll.default], _flip),
    aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
}
