"""Rules of operators that compute each element from those at the same place, and of tensors of one value."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.attention import chosen, without_mask
from stof_tvm.frontend.packing.dims import BATCH, TOKEN, Dim
from stof_tvm.frontend.packing.rewriter import WEIGHTS, Rewriter, Value, arguments

aten = torch.ops.aten
UNTAGGED = {  # elementwise, though they lack the tag that says so
    *(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Tensor),
    *(aten.masked_fill.Scalar, aten.floor_divide.default, aten.floor_divide.Scalar),
}
COPIES = {aten.clone.default, aten._to_copy.default, aten.alias.default, aten.lift_fresh_copy.default}
WHOLE: dict[Any, Any] = {  # of one value; the argument that has it
    **dict.fromkeys([aten.full.default, aten.full_like.default], "fill_value"),
    aten.scalar_tensor.default: "s",
    **dict.fromkeys([aten.zeros.default, aten.zeros_like.default], 0),
    **dict.fromkeys([aten.ones.default, aten.ones_like.default], 1),
}
RANDOM = torch.Tag.nondeterministic_seeded


def is_pointwise(target) -> bool:
    """Whether an operator computes each element of its result from those at the same place of its operands."""
    if not isinstance(target, torch._ops.OpOverload) or RANDOM in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in UNTAGGED


def elementwise(rewriter: Rewriter, node: Node) -> Value:
    """The same operator, with values of sequences spread to their tokens; a mask of scores is taken off."""
    if rewriter.has_sizes(node):
        raise rewriter.refuse(node, "it computes with the length of the batch")
    if (simpler := without_mask(rewriter, node) or chosen(rewriter, node)) is not None:
        return simpler
    operands = {x: rewriter.value(x) for x in node.all_input_nodes}
    if any(x.role == WEIGHTS for x in operands.values()):
        raise rewriter.refuse(node, "it changes the weights of an attention after their softmax")
    if any(x.coordinate == BATCH for x in operands.values()) and not _adds_nothing(node):
        raise rewriter.refuse(node, "it computes with the number of a sequence in its batch")
    if any(x.keeps for x in operands.values()) and not _leaves_masked(node):
        raise rewriter.refuse(node, "it changes scores after the model has masked some")
    rank = node.meta["val"].dim()
    dims, spread = broadcast(rewriter, node, operands, rank)
    same = rewriter.same if spread == operands else _with(rewriter, spread)
    keeps = tuple(dict.fromkeys(mask for x in operands.values() for mask in x.keeps))
    known = {"is_sequence": any(x.is_sequence for x in spread.values()), "keeps": keeps}
    coordinate = next((x.coordinate for x in operands.values() if x.coordinate), "") if _adds_nothing(node) else ""
    value = rewriter.result(node, same(node), dims, **known, fill=_fill(node, operands))
    return replace(value, coordinate=coordinate)


def broadcast(
    rewriter: Rewriter, node: Node, operands: dict[Node, Value], rank: int
) -> tuple[tuple[Dim, ...], dict[Node, Value]]:
    """(the dimensions of operands that are spread to one shape, the operands, those of sequences per token)."""
    dims: list[Dim] = [()] * rank
    for value in operands.values():
        for axis, dim in enumerate(value.dims, start=rank - len(value.dims)):
            if dims[axis] == ():
                dims[axis] = dim
            elif dim not in ((), dims[axis]):
                raise rewriter.refuse(node, f"its operands are not alike along dimension {axis}")
    spread = dict(operands)
    tokens = [axis for axis, dim in enumerate(dims) if TOKEN in dim]
    if tokens:
        for operand, value in operands.items():
            if value.is_sequence:
                spread[operand] = rewriter.per_token(node, value, rank, tokens[0])
    return tuple(dims), spread


def _with(rewriter: Rewriter, values: dict[Node, Value]):
    """`rewriter.same` with other values of some operands."""

    def same(node: Node) -> Node:
        before = {operand: rewriter.values[operand] for operand in values}
        rewriter.values.update(values)
        try:
            return rewriter.same(node)
        finally:
            rewriter.values.update(before)

    return same


def _adds_nothing(node: Node) -> bool:
    """Whether a node is `x + 0` or `x - 0`."""
    is_sum = node.target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
    return is_sum and not isinstance(arguments(node)[1], Node) and arguments(node)[1] == 0


def _leaves_masked(node: Node) -> bool:
    """Whether scores that are as low as a mask makes them stay so: a sum, or a positive multiple."""
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        factor = arguments(node)[1]
        return isinstance(factor, int | float) and bool(factor > 0)
    return node.target is aten.add.Tensor and bool(node.kwargs.get("alpha", 1) == 1)


def _fill(node: Node, operands: dict[Node, Value]):
    """What the result is at padding, if the operands there decide it."""

    def of(x):
        return operands[x].fill if isinstance(x, Node) else x

    target: Any = node.target
    args = arguments(node)
    if target in (aten.mul.Tensor, aten.mul.Scalar) and 0 in (of(args[0]), of(args[1])):
        return 0
    if target in (aten.bitwise_and.Tensor, aten.logical_and.default) and node.meta["val"].dtype == torch.bool:
        if any(of(x) is not None and not of(x) for x in args):
            return False
    if target is aten.where.self and of(args[0]) is not None:
        return of(args[1] if of(args[0]) else args[2])
    if any(operands[x].fill is None for x in node.all_input_nodes):
        return None
    tensors = {x: torch.tensor(operands[x].fill, dtype=x.meta["val"].dtype) for x in node.all_input_nodes}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), tensors.__getitem__)
    try:
        return target(*args, **kwargs).item()
    except Exception:  # PyTorch's, for an operator that takes no single number
        return None


def copied(rewriter: Rewriter, node: Node) -> Value:
    """A copy, perhaps in another dtype, is what it copies."""
    value = rewriter.value(arguments(node)[0])
    kwargs = dict(node.kwargs)
    new = rewriter.emit(node, node.target, value.node, **kwargs)
    value = replace(value, fill=_cast(node, value.fill), constant=_cast(node, value.constant))
    if not new.meta["val"].dtype == value.node.meta["val"].dtype and new.meta["val"].dtype == torch.bool:
        value = replace(value, coordinate="")
    rewriter.check(node, replace(value, node=new))
    return replace(value, node=new)


def _cast(node: Node, number):
    """A number, if any, in the dtype of a node's result."""
    return None if number is None else torch.tensor(number).to(node.meta["val"].dtype).item()


def whole(rewriter: Rewriter, node: Node) -> Value:
    """A tensor of one value."""
    given, name = rewriter.given(node), WHOLE[node.target]
    fill = given[name] if isinstance(name, str) else name
    if isinstance(fill, Node):
        raise rewriter.refuse(node, "its value is a size of the batch")
    fill = _cast(node, fill)
    if "self" in given:
        value = rewriter.value(given["self"])
        new = rewriter.same(node)
        return Value(new, value.dims, value.is_sequence, fill=fill, constant=fill)
    dims = rewriter.simple_dims(node)
    new = rewriter.same(node, size=rewriter.shape(dims, False)) if "size" in given else rewriter.same(node)
    return rewriter.result(node, new, dims, origins=frozenset(), fill=fill, constant=fill)


ELEMENTWISE_RULES = {**dict.fromkeys(COPIES, copied), **dict.fromkeys(WHOLE, whole)}
