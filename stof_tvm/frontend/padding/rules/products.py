"""Rules of products: what is summed over has zeros for padding, in every operand, because 0 times infinity is NaN."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, is_padded, same
from stof_tvm.frontend.padding.rewriter import Rewriter, Value

aten = torch.ops.aten


def _labelled(rewriter: Rewriter, node: Node, operands: list[tuple[str, list[str]]], result: list[str]) -> Value:
    """A product with a label for each dimension: (an argument's name, its labels), and the labels of the result."""
    dims: dict[str, Dim] = {}
    for name, labels in operands:
        value = rewriter.value(rewriter.given(node)[name])
        for label, dim in zip(labels, value.dims, strict=True):
            if not dims.get(label):
                dims[label] = dim
            elif dim != () and not same(dim, dims[label]):
                raise rewriter.refuse(node, "its operands have padding in different places")
    for name, labels in operands:
        summed = [n for n, label in enumerate(labels) if label not in result and is_padded(dims[label])]
        x = rewriter.given(node)[name]
        if any(rewriter.value(x).dims[n] == () for n in summed):
            raise rewriter.refuse(node, "it sums one operand's padding with what another repeats")
        rewriter.set_argument(node, name, rewriter.filled(x, summed, 0.0, node))
    return Value(tuple(dims[label] for label in result))


def _matmul(rewriter: Rewriter, node: Node) -> Value:
    """Products of the last two dimensions, the others spread as in a sum."""
    names = [argument.name for argument in node.target._schema.arguments[:2]]  # type: ignore[union-attr]
    ranks = [len(rewriter.value(rewriter.given(node)[name]).dims) for name in names]
    leading = [[f"batch {n}" for n in range(rank - 2, 0, -1)] for rank in ranks]
    labels = [
        [*leading[0], "row", "sum"] if ranks[0] > 1 else ["sum"],
        [*leading[1], "sum", "column"] if ranks[1] > 1 else ["sum"],
    ]
    longer = max(leading, key=len)
    result = [*longer, *(["row"] if ranks[0] > 1 else []), *(["column"] if ranks[1] > 1 else [])]
    return _labelled(rewriter, node, list(zip(names, labels)), result)


def _linear(rewriter: Rewriter, node: Node) -> Value:
    value = rewriter.value(rewriter.given(node)["input"])
    rows = [f"row {n}" for n in range(len(value.dims) - 1)]
    bias = [("bias", ["column"])] if rewriter.given(node).get("bias") is not None else []
    weight = ["column", "sum"] if len(rewriter.value(rewriter.given(node)["weight"]).dims) > 1 else ["sum"]
    result = [*rows, "column"] if len(weight) > 1 else rows
    return _labelled(rewriter, node, [("input", [*rows, "sum"]), ("weight", weight), *bias], result)


def _with_sum(labels: tuple[str, str, str]) -> object:
    """addmm and baddbmm: a product plus a tensor that is spread to it."""
    first, second, result = (list(text) for text in labels)

    def rule(rewriter: Rewriter, node: Node) -> Value:
        given = rewriter.given(node)
        names = [argument.name for argument in node.target._schema.arguments[:3]]  # type: ignore[union-attr]
        added = result[len(result) - len(rewriter.value(given[names[0]]).dims) :]
        return _labelled(rewriter, node, [(names[0], added), (names[1], first), (names[2], second)], result)

    return rule


def _einsum(rewriter: Rewriter, node: Node) -> Value:
    given = rewriter.given(node)
    equation = given["equation"].replace(" ", "")
    left, arrow, result = equation.partition("->")
    parts = left.split(",")
    if "." in equation or any(len(set(part)) < len(part) for part in parts):
        raise rewriter.refuse(node, f"the equation {equation}")
    if not arrow:
        result = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    operands = list(given["tensors"])
    dims: dict[str, Dim] = {}
    for x, labels in zip(operands, parts, strict=True):
        for label, dim in zip(labels, rewriter.value(x).dims, strict=True):
            if not dims.get(label):
                dims[label] = dim
            elif not same(dim, dims[label]) and dim != ():
                raise rewriter.refuse(node, "its operands have padding in different places")
    for number, labels in enumerate(parts):
        summed = [n for n, label in enumerate(labels) if label not in result and is_padded(dims[label])]
        if any(rewriter.value(operands[number]).dims[n] == () for n in summed):
            raise rewriter.refuse(node, "it sums one operand's padding with what another repeats")
        operands[number] = rewriter.filled(operands[number], summed, 0.0, node)
    rewriter.set_argument(node, "tensors", operands)
    return Value(tuple(dims[label] for label in result))


PRODUCT_RULES = {
    **dict.fromkeys([aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default], _matmul),
    aten.dot.default: _matmul,
    aten.linear.default: _linear,
    aten.addmm.default: _with_sum(("rs", "sc", "rc")),
    aten.baddbmm.default: _with_sum(("brs", "bsc", "brc")),
    aten.einsum.default: _einsum,
}
