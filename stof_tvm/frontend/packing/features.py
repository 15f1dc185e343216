"""Rules of operators that compute something of each token's or sequence's features by themselves."""

import math
import operator

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.dims import BATCH, TOKEN, Dim, is_fixed, joined
from stof_tvm.frontend.packing.rewriter import NUMBER, PLACE, WITHOUT_PADDING, Rewriter, Value, arguments

aten = torch.ops.aten


def _of_features(rewriter: Rewriter, node: Node, axes, value: Value) -> None:
    """An error unless the dimensions `axes` are features, and not tokens or sequences."""
    if not all(is_fixed(value.dims[axis]) for axis in axes):
        raise rewriter.refuse(node, "it goes over tokens or sequences")


def _norm(rewriter: Rewriter, node: Node) -> Value:
    value, given = rewriter.value(arguments(node)[0]), rewriter.given(node)
    count = len(given["normalized_shape"])
    _of_features(rewriter, node, range(len(value.dims) - count, len(value.dims)), value)
    _fixed(rewriter, node, [given.get("weight"), given.get("bias")])
    return rewriter.result(node, rewriter.same(node), value.dims, is_sequence=value.is_sequence)


def _fixed(rewriter: Rewriter, node: Node, operands) -> None:
    if not all(rewriter.value(x).is_fixed for x in operands if isinstance(x, Node)):
        raise rewriter.refuse(node, "its weights depend on the inputs")


def _linear(rewriter: Rewriter, node: Node) -> Value:
    """x (*, C) by weights: of the features of each token."""
    given = rewriter.given(node)
    x = rewriter.value(given["input"])
    _of_features(rewriter, node, [len(x.dims) - 1], x)
    _fixed(rewriter, node, [given["weight"], given["bias"]])
    features = given["weight"].meta["val"].shape[0]
    return rewriter.result(node, rewriter.same(node), (*x.dims[:-1], joined([features])), is_sequence=x.is_sequence)


def _addmm(rewriter: Rewriter, node: Node) -> Value:
    given = rewriter.given(node)
    x = rewriter.value(given["mat1"])
    _of_features(rewriter, node, [1], x)
    _fixed(rewriter, node, [given["self"], given["mat2"]])
    dims = (x.dims[0], joined([given["mat2"].meta["val"].shape[1]]))
    return rewriter.result(node, rewriter.same(node), dims, is_sequence=x.is_sequence)


def _embedding(rewriter: Rewriter, node: Node) -> Value:
    weight, index = (rewriter.value(x) for x in arguments(node)[:2])
    _fixed(rewriter, node, [arguments(node)[0]])
    if index.coordinate == BATCH:
        raise rewriter.refuse(node, "it computes with the number of a sequence in its batch")
    return rewriter.result(node, rewriter.same(node), (*index.dims, weight.dims[1]), is_sequence=index.is_sequence)


def _axes(node: Node, value: Value, given: dict) -> tuple[list[int], bool]:
    """(the dimensions that a reduction goes over, whether they stay with size 1)."""
    dim = given.get("dim")
    dim = list(range(len(value.dims))) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted(axis % max(len(value.dims), 1) for axis in dim), bool(given.get("keepdim", False))


def reduced(value: Value, axes, keepdim: bool) -> tuple[Dim, ...]:
    """The dimensions of a reduction's result."""
    if keepdim:
        return tuple(() if axis in axes else dim for axis, dim in enumerate(value.dims))
    return tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes)


def _reduction(rewriter: Rewriter, node: Node):
    """A sum, mean or the like of features; a sum of masked tokens is one of each sequence's."""
    value, given = rewriter.value(arguments(node)[0]), rewriter.given(node)
    axes, keepdim = _axes(node, value, given)
    if node.target is aten.sum.dim_IntList and len(axes) == 1 and value.dims[axes[0]] == (TOKEN,):
        return _sum_of_tokens(rewriter, node, value, axes[0], keepdim)
    _of_features(rewriter, node, axes, value)
    if value.role:
        raise rewriter.refuse(node, "it reduces the weights of an attention")
    dims = reduced(value, axes, keepdim)
    new = rewriter.same(node)
    results = new.meta["val"]
    if not isinstance(results, tuple | list):
        return rewriter.result(node, new, dims, is_sequence=value.is_sequence)
    parts = []
    for number, result in enumerate(results):
        part = rewriter.graph.call_function(operator.getitem, (new, number))
        part.meta.update({**new.meta, "val": result})
        parts.append(Value(part, dims, value.is_sequence, value.origins))
        rewriter.check(node, parts[-1], node.meta["val"][number])
    return parts


def _sum_of_tokens(rewriter: Rewriter, node: Node, value: Value, axis: int, keepdim: bool) -> Value:
    """Σ over the tokens of each sequence, where the given program adds 0 for padding: a product by 0 and 1."""
    if value.fill != 0 or value.is_pair:
        why = ", and padding is not known to be 0 there (multiply by the mask)"
        raise rewriter.refuse(node, "it sums over tokens" + (why if rewriter.purpose is WITHOUT_PADDING else ""))
    if [n for n, dim in enumerate(value.dims) if BATCH in dim] != [axis - 1] or value.dims[axis - 1] != (BATCH,):
        raise rewriter.refuse(node, "it sums over the tokens of no batch")
    dtype = node.meta["val"].dtype
    numbers = rewriter.emit(node, aten.unsqueeze.default, rewriter.input(NUMBER), 0)
    rows = rewriter.emit(node, aten.arange.start_step, 0, rewriter.sequences, device=rewriter.device)
    rows = rewriter.emit(node, aten.unsqueeze.default, rows, 1)
    of_row = rewriter.emit(node, aten.eq.Tensor, numbers, rows)  # (sequences, tokens)
    lead, features = value.dims[: axis - 1], value.dims[axis + 1 :]
    if lead:
        raise rewriter.refuse(node, "it sums over tokens of a value whose first dimension is not the batch")
    width = math.prod(rewriter.shape(features, False))
    x = value.node
    if not dtype.is_floating_point:
        if width != 1:
            raise rewriter.refuse(node, "it sums integers of several features over tokens")
        x = rewriter.emit(node, aten.view.default, x, [1, rewriter.tokens])
        zero = rewriter.emit(node, aten.where.ScalarOther, of_row, x, 0)
        new = rewriter.emit(node, aten.sum.dim_IntList, zero, [1])
    else:
        x = rewriter.emit(node, aten.clone.default, x, memory_format=torch.contiguous_format)
        x = rewriter.emit(node, aten.view.default, x, [rewriter.tokens, width])
        ones = rewriter.emit(node, aten._to_copy.default, of_row, dtype=dtype)
        new = rewriter.emit(node, aten.mm.default, ones, x)
    dims = reduced(value, [axis], keepdim)
    new = rewriter.emit(node, aten.view.default, new, rewriter.shape(dims, True))
    return rewriter.result(node, new, dims, is_sequence=True, origins=value.origins | {NUMBER})


def _along(rewriter: Rewriter, node: Node):
    """An operator along one dimension of features whose result has the operand's dimensions."""
    value, given = rewriter.value(arguments(node)[0]), rewriter.given(node)
    dims = given.get("dims", given.get("dim", -1))
    _of_features(
        rewriter, node, [axis % len(value.dims) for axis in ([dims] if isinstance(dims, int) else dims)], value
    )
    return rewriter.result(node, rewriter.same(node), value.dims, is_sequence=value.is_sequence)


def _arange(rewriter: Rewriter, node: Node) -> Value:
    """The positions 0, 1, … of the tokens, or of the sequences in the batch."""
    given = rewriter.given(node)
    start, step = given.get("start", 0), given.get("step", 1)
    ((number, symbols),) = rewriter.sizes(node)
    if not symbols.total():
        if rewriter.has_sizes(node):
            raise rewriter.refuse(node, "its values depend on the length of the batch")
        return Value(rewriter.same(node), (joined([number]),))
    if number != 1 or symbols.total() != 1 or not isinstance(start, int) or not isinstance(step, int) or step < 1:
        raise rewriter.refuse(node, "it does not count tokens")
    dtype = node.meta["val"].dtype
    if symbols[BATCH]:
        if (start, step) != (0, 1):
            raise rewriter.refuse(node, "it computes with the number of a sequence in its batch")
        new = rewriter.emit(node, aten.arange.start_step, 0, rewriter.sequences, 1, dtype=dtype)
        return Value(new, ((BATCH,),), True, coordinate=BATCH)
    new = rewriter.input(PLACE)
    if step != 1:
        new = rewriter.emit(node, aten.mul.Tensor, new, step)
    if start != 0:
        new = rewriter.emit(node, aten.add.Tensor, new, start)
    if dtype != torch.int64:
        new = rewriter.emit(node, aten._to_copy.default, new, dtype=dtype)
    coordinate = TOKEN if (start, step) == (0, 1) else ""
    return rewriter.result(node, new, ((TOKEN,),), origins=frozenset({PLACE}), coordinate=coordinate)


FEATURE_RULES = {
    **dict.fromkeys([aten.layer_norm.default, aten.rms_norm.default], _norm),
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    **dict.fromkeys(
        [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction]
        + [aten.prod.dim_int, aten.any.dim, aten.any.dims, aten.argmax.default, aten.argmin.default]
        + [aten.max.dim, aten.min.dim, aten.linalg_vector_norm.default, aten.logsumexp.default],
        _reduction,
    ),
    aten.flip.default: _along,
    **dict.fromkeys([aten.arange.start_step, aten.arange.default, aten.arange.start], _arange),
}
