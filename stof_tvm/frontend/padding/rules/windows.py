"""Rules of convolutions and pooling: padding is zeros for a convolution, as the operator's own padding is."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, dim_of, is_padded
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.rules.reductions import lowest
from stof_tvm.frontend.padding.rules.views import operand

aten = torch.ops.aten


def _spatial(rewriter: Rewriter, node: Node, name: str, first: int) -> list[int]:
    """The dimensions from `first` on that have padding, which is brought to their ends."""
    value = rewriter.value(rewriter.given(node)[name])
    axes = [axis for axis in range(first, len(value.dims)) if is_padded(value.dims[axis])]
    rewriter.compact_argument(node, axes, name)
    return axes


def _sized(rewriter: Rewriter, node: Node, value: Value, first: int) -> Value:
    """The result, whose dimensions from `first` on have sizes by the operator's formula."""
    result = rewriter.twins[node.name].meta["val"]
    shape = (result[0] if isinstance(result, tuple | list) else result).shape
    dims: list[Dim] = [*value.dims[:first], *(dim_of(n) for n in shape[first:])]
    return Value(tuple(dims))


def _convolution(rewriter: Rewriter, node: Node) -> Value:
    """x (N, C, *): a row of the result reads rows at fixed distances, and zeros beyond the last."""
    value, given = operand(rewriter, node), rewriter.given(node)
    if is_padded(value.dims[1]) or any(map(is_padded, rewriter.value(given["weight"]).dims)):
        raise rewriter.refuse(node, "its channels or weights have padding")
    axes = _spatial(rewriter, node, "input", 2)
    source = rewriter.given(node)["input"]
    reaches = [
        axis for axis in axes if given["transposed"] or given["padding"][min(axis - 2, len(given["padding"]) - 1)]
    ]
    rewriter.set_argument(node, "input", rewriter.filled(source, reaches, 0.0, node, is_exact=True))
    known = _sized(rewriter, node, value, 2)
    channels = dim_of(node.meta["val"].shape[1])
    return Value((known.dims[0], channels, *known.dims[2:]))


def _average(rewriter: Rewriter, node: Node) -> Value:
    """Averages of windows: of whole ones, or with zeros that count."""
    value, given = operand(rewriter, node), rewriter.given(node)
    rank = len(given["kernel_size"])
    axes = _spatial(rewriter, node, "self", len(value.dims) - rank)
    has_zeros = any(given.get("padding", [0]))
    if axes and (given.get("ceil_mode", False) or (has_zeros and not given.get("count_include_pad", True))):
        raise rewriter.refuse(node, "what its last windows divide by depends on the size")
    if has_zeros:
        source: Node = node.args[0]  # type: ignore[assignment]
        rewriter.set_argument(node, "self", rewriter.filled(source, axes, 0.0, node, is_exact=True))
    return _sized(rewriter, node, value, len(value.dims) - rank)


def _maximum(rewriter: Rewriter, node: Node) -> list[Value | None]:
    """Largest elements of windows, and their places, which count padding."""
    value, given = operand(rewriter, node), rewriter.given(node)
    rank = len(given["kernel_size"])
    axes = _spatial(rewriter, node, "self", len(value.dims) - rank)
    fill = lowest(node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    rewriter.set_argument(node, "self", rewriter.filled(node.args[0], axes, fill, node))  # type: ignore[arg-type]
    known = _sized(rewriter, node, value, len(value.dims) - rank)
    return [known, known if not axes else None]


def _per_image(rewriter: Rewriter, node: Node) -> Value:
    """x (N, C, *): computed for each image and channel by itself."""
    value = operand(rewriter, node)
    if any(map(is_padded, value.dims[2:])) or len(value.dims) < 3 or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "its windows depend on sizes")
    return _sized(rewriter, node, value, 2)


WINDOW_RULES = {
    aten.convolution.default: _convolution,
    **dict.fromkeys([aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default], _average),
    **dict.fromkeys([aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default], _maximum),
    **dict.fromkeys(
        [aten._adaptive_avg_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec], _per_image
    ),
}
