"""The rule of each operator, and what may be done to scores that a mask was taken off."""

from collections.abc import Callable

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.attention import ATTENTION_RULES
from stof_tvm.frontend.packing.elementwise import COPIES, ELEMENTWISE_RULES, WHOLE, elementwise, is_pointwise
from stof_tvm.frontend.packing.features import FEATURE_RULES
from stof_tvm.frontend.packing.indexing import INDEX_RULES
from stof_tvm.frontend.packing.rewriter import WEIGHTS, Rewriter, Value
from stof_tvm.frontend.packing.views import VIEW_RULES

aten = torch.ops.aten
IN_PLACE = {  # views that may leave pairs of tokens, and heads, where they are
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int),
}
RULES: dict = {**ELEMENTWISE_RULES, **VIEW_RULES, **FEATURE_RULES, **ATTENTION_RULES, **INDEX_RULES}


def rule_of(rewriter: Rewriter, node: Node) -> Callable:
    """The rule of a node's operator; UnsupportedError where there is none."""
    if (rule := RULES.get(node.target)) is not None:
        return rule
    if is_pointwise(node.target):
        return elementwise
    raise rewriter.refuse(node, "nothing is known of how it mixes tokens")


def check_masked(rewriter: Rewriter, node: Node, operands: list[Value], result) -> None:
    """An error where a node may lose or misplace a mask that was taken off its operands (Value.keeps).

    That mask is of the pairs in the last two dimensions, or of these and the heads in front of them.
    """
    if node.target in WHOLE or node.target is aten.scaled_dot_product_attention.default:
        return  # the one reads no scores, the other's rule takes the mask
    for value in operands:
        if value.keeps and not _leaves_in_place(node, value, result):
            raise rewriter.refuse(node, "it changes scores after the model has masked some")


def _leaves_in_place(node: Node, value: Value, result) -> bool:
    """Whether a node's result has the scores `value` where their mask is, or is their softmax."""
    if not isinstance(result, Value):
        return False
    if result.role == WEIGHTS:
        return True
    may_leave = is_pointwise(node.target) or node.target in COPIES or node.target in IN_PLACE
    count = 3 if any(mask.heads for mask in value.keeps) else 2
    is_same = may_leave and result.dims[-count:] == value.dims[-count:] and {*value.keeps} <= {*result.keeps}
    return is_same and result.node.meta["val"].dtype.is_floating_point  # as booleans, masked scores are True
