"""The rule of each operator."""

from collections.abc import Callable

from torch.fx import Node

from stof_tvm.frontend.packing.attention import ATTENTION_RULES
from stof_tvm.frontend.packing.elementwise import ELEMENTWISE_RULES, elementwise, is_pointwise
from stof_tvm.frontend.packing.features import FEATURE_RULES
from stof_tvm.frontend.packing.indexing import INDEX_RULES
from stof_tvm.frontend.packing.rewriter import Rewriter
from stof_tvm.frontend.packing.views import VIEW_RULES

RULES: dict = {**ELEMENTWISE_RULES, **VIEW_RULES, **FEATURE_RULES, **ATTENTION_RULES, **INDEX_RULES}


def rule_of(rewriter: Rewriter, node: Node) -> Callable:
    """The rule of a node's operator; UnsupportedError where there is none."""
    if (rule := RULES.get(node.target)) is not None:
        return rule
    if is_pointwise(node.target):
        return elementwise
    raise rewriter.refuse(node, "nothing is known of how it mixes tokens")
