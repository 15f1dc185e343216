"""Rules of operators that compute each element from those at the same place, and of tensors of one value."""

import math

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, dim_of, is_padded, same
from stof_tvm.frontend.padding.rewriter import OfRow, Real, Rewriter, Value

aten = torch.ops.aten
UNTAGGED = {  # elementwise, though they lack the tag that says so
    *(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Tensor),
    *(aten.floor_divide.default, aten.floor_divide.Scalar, aten._prelu_kernel.default, aten.copy.default),
}
ABSORBING: dict[object, float] = {  # a result that one operand decides
    **dict.fromkeys([aten.logical_and.default, aten.bitwise_and.Tensor], 0.0),
    **dict.fromkeys([aten.logical_or.default, aten.bitwise_or.Tensor], 1.0),
}


def broadcast(rewriter: Rewriter, node: Node, operands: list[Node], rank: int) -> tuple[Dim, ...]:
    """The dimensions of operands that are spread to one shape; an error where their padding is in other places."""
    dims: list[Dim] = [()] * rank
    for operand in operands:
        own = rewriter.value(operand).dims
        for axis, dim in enumerate(own, start=rank - len(own)):
            if dims[axis] == ():
                dims[axis] = dim
            elif dim != () and not same(dim, dims[axis]):
                raise rewriter.refuse(node, f"its operands have padding in different places along dimension {axis}")
    return tuple(dims)


def elementwise(rewriter: Rewriter, node: Node) -> Value:
    """Padding stays where it is; a number that depends on sizes becomes the real one."""
    if any(map(is_symbolic, rewriter.given(node).values())):
        return _with_numbers(rewriter, node)
    value = node.meta["val"]
    dims = broadcast(rewriter, node, node.all_input_nodes, value.dim())
    if node.target is aten.exp.default and rewriter.has_masks and any(len(dim) > 1 for dim in dims):
        raise rewriter.refuse(node, "masks are given, and rows or columns have padding inside")
    fills = {}
    if (decisive := ABSORBING.get(node.target)) is not None and value.dtype == torch.bool:
        for operand in node.all_input_nodes:
            known = rewriter.value(operand)
            shift = value.dim() - len(known.dims)
            decided = {n: fill for n, fill in known.fills.items() if fill == decisive and not isinstance(fill, OfRow)}
            fills.update({axis + shift: fill for axis, fill in decided.items()})
    return Value(dims, fills)


def _with_numbers(rewriter: Rewriter, node: Node) -> Value:
    """The operator on tensors that each call brings, instead of numbers that depend on sizes."""
    given, schema = rewriter.given(node), node.target._schema  # type: ignore[union-attr]
    operands = [given[x.name] for x in schema.arguments if not x.kwarg_only]
    operands = [rewriter.number(x) if is_symbolic(x) else x for x in operands]
    options = {x.name: given[x.name] for x in schema.arguments if x.kwarg_only and given[x.name] != x.default_value}
    packet = getattr(aten, schema.name.removeprefix("aten::"))
    for target in (getattr(packet, overload) for overload in packet.overloads()):
        if is_pointwise(target) and _takes(target, operands, options):
            tensors = [_as_tensor(rewriter, node, *pair) for pair in zip(operands, _kinds(target), strict=True)]
            new = rewriter.emit(node, target, *tensors, **options)
            dims = broadcast(rewriter, node, new.all_input_nodes, new.meta["val"].dim())
            rewriter.replace(node, new, Value(dims))
            return Value(dims)
    raise rewriter.refuse(node, "it takes a number that depends on sizes, and no tensor in its place")


def is_pointwise(target) -> bool:
    """Whether an operator computes each element of its result from those at the same place of its operands."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target in UNTAGGED


def is_symbolic(x) -> bool:
    """Whether an argument depends on sizes."""
    return isinstance(x, Real) or hasattr(x, "free_symbols")


def _takes(target, operands: list, options: dict) -> bool:
    """Whether an overload of an operator takes these arguments."""
    arguments = [x for x in target._schema.arguments if not x.kwarg_only]
    names = {x.name for x in target._schema.arguments if x.kwarg_only}
    if target._schema.is_mutable or "out" in names or not options.keys() <= names:
        return False
    if len(arguments) != len(operands) or any(map(is_symbolic, options.values())):
        return False
    return all(not isinstance(x, Node) or "Tensor" in kind for kind, x in zip(_kinds(target), operands, strict=True))


def _kinds(target) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments if not argument.kwarg_only]


def _as_tensor(rewriter: Rewriter, node: Node, x, kind: str):
    """A number where an overload takes a tensor."""
    if "Tensor" not in kind or not isinstance(x, bool | int | float):
        return x
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float64
    return rewriter.emit(node, aten.scalar_tensor.default, x, dtype=dtype, device=node.meta["val"].device)


def _whole(rewriter: Rewriter, node: Node) -> Value:
    """A tensor of one value, or memory that the model writes next, which is zeros until then."""
    dims = tuple(dim_of(n) for n in rewriter.twins[node.name].meta["val"].shape)
    given = rewriter.given(node)
    fill = given.get("fill_value", given.get("value", 1.0 if "ones" in str(node.target) else 0.0))
    if isinstance(fill, bool | int | float):
        if "self" in given:
            dims = rewriter.value(given["self"]).dims
        return Value(dims, {axis: float(fill) for axis, dim in enumerate(dims) if is_padded(dim)})
    if isinstance(fill, Node):
        raise rewriter.refuse(node, "it fills a tensor with another")
    dtype, shape = node.meta["val"].dtype, list(node.meta["val"].shape)
    number = rewriter.cast(rewriter.number(fill), dtype, node)  # type: ignore[arg-type]
    new = rewriter.emit(node, aten.expand.default, number, shape)
    rewriter.replace(node, rewriter.emit(node, aten.clone.default, new), Value(dims))
    return Value(dims)


def _scalar(rewriter: Rewriter, node: Node) -> Value:
    number = rewriter.number(rewriter.given(node)["s"])
    assert isinstance(number, Node), "the rule is called for symbols"
    rewriter.replace(node, rewriter.emit(node, aten.clone.default, number), Value(()))
    return Value(())


def _copied(rewriter: Rewriter, node: Node) -> Value:
    """A copy, perhaps in another dtype: NaN becomes a number in one that is not of floats."""
    value = rewriter.value(node.args[0])  # type: ignore[arg-type]
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point:
        kept = {axis: fill for axis, fill in value.fills.items() if fill == 0 or math.isinf(fill)}
    else:
        kept = {axis: fill for axis, fill in value.fills.items() if fill == 0 and not isinstance(fill, OfRow)}
    return Value(value.dims, kept)


def _arange(rewriter: Rewriter, node: Node) -> Value:
    """Numbers from `start` in steps: those of a longer tensor begin with those of a shorter one."""
    given = rewriter.given(node)
    start, step = given.get("start", 0), given.get("step", 1)
    if not isinstance(step, int | float):
        raise rewriter.refuse(node, "its step depends on sizes")
    dims = (dim_of(rewriter.twins[node.name].meta["val"].shape[0]),)
    if isinstance(start, int | float):
        return Value(dims)
    places = rewriter.emit(
        node, aten.arange.start_step, 0, node.meta["val"].shape[0], 1, dtype=torch.int64, device=node.meta["val"].device
    )
    scaled = rewriter.emit(node, aten.mul.Tensor, places, step)
    rewriter.replace(node, rewriter.emit(node, aten.add.Tensor, scaled, rewriter.number(start)), Value(dims))
    return Value(dims)


def _triangle(rewriter: Rewriter, node: Node) -> Value:
    value = rewriter.value(node.args[0])  # type: ignore[arg-type]
    if any(len(dim) > 1 for dim in value.dims[-2:]) or rewriter.has_symbols(node):
        raise rewriter.refuse(node, "its diagonal depends on padding")
    return Value(value.dims)


ELEMENTWISE_RULES = {
    **dict.fromkeys(
        [
            aten.clone.default,
            aten.alias.default,
            aten._to_copy.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
        ],
        _copied,
    ),
    **dict.fromkeys(
        [aten.full.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default]
        + [aten.ones.default, aten.zeros.default, aten.empty.memory_format, aten.empty_permuted.default],
        _whole,
    ),
    aten.scalar_tensor.default: _scalar,
    aten.arange.start_step: _arange,
    aten.arange.start: _arange,
    aten.arange.default: _arange,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
}
