"""Rules of reductions: what a dimension's padding must hold so that the result does not notice it."""

import math
from collections.abc import Callable

import sympy
import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, Size, is_first, is_padded, length
from stof_tvm.frontend.padding.rewriter import OfRow, Rewriter, Value
from stof_tvm.frontend.padding.rules.elementwise import is_symbolic
from stof_tvm.frontend.padding.rules.views import axis_of, operand

aten = torch.ops.aten


def lowest(dtype: torch.dtype) -> float:
    """A value that no maximum notices."""
    return -math.inf if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """A value that no minimum notices."""
    return math.inf if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def zero(dtype: torch.dtype) -> float:
    """A value that no sum notices."""
    return False if dtype is torch.bool else 0


def one(dtype: torch.dtype) -> float:
    """A value that no product notices."""
    return True if dtype is torch.bool else 1


def _axes(rewriter: Rewriter, node: Node, value: Value) -> tuple[list[int], bool]:
    """(the dimensions that are reduced, whether they stay as dimensions of size 1)."""
    given = rewriter.given(node)
    axes = given.get("dim")
    axes = list(range(len(value.dims))) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    return sorted({axis_of(axis, value) for axis in axes}), bool(given.get("keepdim", False))


def _reduced(value: Value, axes: list[int], keep: bool) -> Value:
    """What is left of the dimensions."""
    dims: list[Dim] = []
    for axis, dim in enumerate(value.dims):
        if axis not in axes:
            dims.append(dim)
        elif keep:
            dims.append(())
    return Value(tuple(dims))


def _with(neutral: Callable) -> Callable:
    """The rule of a reduction that does not notice `neutral(dtype)` among its elements."""

    def rule(rewriter: Rewriter, node: Node):
        value = operand(rewriter, node)
        axes, keep = _axes(rewriter, node, value)
        _set_source(rewriter, node, axes, neutral)
        known = _reduced(value, axes, keep)
        return [known, known] if isinstance(node.meta["val"], tuple | list) else known

    return rule


def _set_source(rewriter: Rewriter, node: Node, axes: list[int], neutral: Callable) -> None:
    source = node.args[0]
    filled = rewriter.filled(source, axes, neutral(source.meta["val"].dtype), node)  # type: ignore
    node.args = (filled, *node.args[1:])


def _place(neutral: Callable) -> Callable:
    """argmax and argmin: of one dimension, or of a tensor that has no other."""

    def rule(rewriter: Rewriter, node: Node):
        value = operand(rewriter, node)
        axes, keep = _axes(rewriter, node, value)
        if len(axes) > 1 and _any_padded(value, axes):
            raise rewriter.refuse(node, "it counts places among padding")
        value = rewriter.compact_argument(node, axes)
        _set_source(rewriter, node, axes, neutral)
        return _reduced(value, axes, keep)

    return rule


def _extreme(neutral: Callable) -> Callable:
    """max and min along a dimension: values and places."""
    rule = _place(neutral)

    def both(rewriter: Rewriter, node: Node):
        known = rule(rewriter, node)
        return [known, known]

    return both


def _any_padded(value: Value, axes: list[int]) -> bool:
    return any(is_padded(value.dims[axis]) for axis in axes)


def _count(value: Value, axes: list[int]) -> Size:
    """How many elements are reduced to one."""
    count: Size = 1
    for axis in axes:
        count = count * length(value.dims[axis])
    return count


def _mean(rewriter: Rewriter, node: Node) -> Value:
    value = operand(rewriter, node)
    axes, keep = _axes(rewriter, node, value)
    known = _reduced(value, axes, keep)
    if _any_padded(value, axes):
        source, result = node.args[0], node.meta["val"].dtype
        rewriter.replace(node, _mean_of(rewriter, node, source, axes, keep, result, _count(value, axes)), known)  # type: ignore
    return known


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _mean_of(rewriter: Rewriter, node: Node, source: Node, axes, keep: bool, dtype, count: Size) -> Node:
    """A sum without padding over a number, in float32 at least."""
    filled = rewriter.filled(source, axes, zero(source.meta["val"].dtype), node)
    total = rewriter.emit(node, aten.sum.dim_IntList, filled, axes, keep, dtype=_wide(dtype))
    return rewriter.emit(node, aten.div.Tensor, total, rewriter.number(count))


def _variance(rewriter: Rewriter, node: Node):
    """The mean square of what is left of a mean, by the real number of elements."""
    value, given = operand(rewriter, node), rewriter.given(node)
    axes, keep = _axes(rewriter, node, value)
    known = _reduced(value, axes, keep)
    has_mean, is_root = isinstance(node.meta["val"], tuple | list), node.target is aten.std.correction
    if not _any_padded(value, axes):
        return [known, known] if has_mean else known
    correction = 1 if given.get("correction") is None else given["correction"]
    if is_symbolic(correction) or int(correction) != correction:
        raise rewriter.refuse(node, f"its correction is {correction}")
    count, source = _count(value, axes), node.args[0]
    dtype = source.meta["val"].dtype  # type: ignore[union-attr]
    wide = rewriter.cast(source, _wide(dtype), node)  # type: ignore[arg-type]
    mean = _mean_of(rewriter, node, wide, axes, True, wide.meta["val"].dtype, count)
    left = rewriter.emit(node, aten.sub.Tensor, wide, mean, value=Value(value.dims))
    square = rewriter.emit(node, aten.mul.Tensor, left, left, value=Value(value.dims))
    left_count = sympy.Max(0, count - int(correction))
    result = _mean_of(rewriter, node, square, axes, keep, wide.meta["val"].dtype, left_count)
    result = rewriter.emit(node, aten.sqrt.default, result) if is_root else result
    if not has_mean:
        rewriter.replace(node, result, known)
        return known
    mean = mean if keep else rewriter.emit(node, aten.squeeze.dims, mean, axes)
    for user in list(node.users):
        new = (result, mean)[user.args[1]]  # type: ignore[index]
        rewriter.replaced[user] = rewriter.cast(new, dtype, node), known
    return [known, known]


def _norm(rewriter: Rewriter, node: Node) -> Value:
    """A vector's norm: zeros change none of an order above 0."""
    value, given = operand(rewriter, node), rewriter.given(node)
    order = given.get("ord", given.get("p"))
    order = 2 if order is None else order
    if is_symbolic(order) or not order > 0:
        raise rewriter.refuse(node, f"a norm of order {order}")
    axes, keep = _axes(rewriter, node, value)
    _set_source(rewriter, node, axes, zero)
    return _reduced(value, axes, keep)


def _softmax(rewriter: Rewriter, node: Node) -> Value:
    value, given = operand(rewriter, node), rewriter.given(node)
    axis = axis_of(given["dim"], value)
    if rewriter.has_masks and any(not is_first(dim) for dim in value.dims):
        raise rewriter.refuse(node, "masks are given, and rows or columns have padding inside")
    if not is_padded(value.dims[axis]):
        return Value(value.dims)
    _set_source(rewriter, node, [axis], lowest)
    return Value(value.dims, {axis: OfRow(-math.inf if "log" in str(node.target) else 0.0)})


def _scan(neutral: Callable) -> Callable:
    """Sums of all elements so far: later ones reach none, but a kernel may multiply them by 0: NaN for infinity.

    Integers are none, and stay as they are: what depends on no input does so afterwards.
    """

    def rule(rewriter: Rewriter, node: Node):
        value = operand(rewriter, node)
        axis = axis_of(rewriter.given(node)["dim"], value)
        value = rewriter.compact_argument(node, [axis])
        if node.args[0].meta["val"].dtype.is_floating_point:  # type: ignore[union-attr]
            _set_source(rewriter, node, [axis], neutral)
        known = Value(value.dims)
        return [known, known] if isinstance(node.meta["val"], tuple | list) else known

    return rule


REDUCTION_RULES = {
    **dict.fromkeys([aten.sum.default, aten.sum.dim_IntList], _with(zero)),
    **dict.fromkeys([aten.amax.default, aten.max.default], _with(lowest)),
    **dict.fromkeys([aten.amin.default, aten.min.default], _with(highest)),
    **dict.fromkeys([aten.any.default, aten.any.dim, aten.any.dims], _with(zero)),
    **dict.fromkeys([aten.all.default, aten.all.dim, aten.all.dims], _with(one)),
    **dict.fromkeys([aten.prod.default, aten.prod.dim_int], _with(one)),
    aten.logsumexp.default: _with(lowest),
    aten.argmax.default: _place(lowest),
    aten.argmin.default: _place(highest),
    aten.max.dim: _extreme(lowest),
    aten.min.dim: _extreme(highest),
    **dict.fromkeys([aten.mean.default, aten.mean.dim], _mean),
    **dict.fromkeys([aten.var.correction, aten.var_mean.correction, aten.std.correction], _variance),
    **dict.fromkeys([aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim], _norm),
    **dict.fromkeys(
        [aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default], _softmax
    ),
    aten.cumsum.default: _scan(zero),
    aten.cumprod.default: _scan(one),
    aten.logcumsumexp.default: _scan(lowest),
    aten.cummax.default: _scan(lowest),
    aten.cummin.default: _scan(highest),
}
