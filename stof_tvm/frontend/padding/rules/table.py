"""The rule of each operator.

A rule is `f(rewriter, node)`: it returns what is known of the node's result, a Value, or a list for several results,
with None for one that depends on padding; it may change the graph.  It is called only where an operand has padding,
or where the node's arguments or sizes are symbolic.
"""

from collections.abc import Callable

import torch

from stof_tvm.frontend.padding.rewriter import Rewriter
from stof_tvm.frontend.padding.rules.attention import ATTENTION_RULES
from stof_tvm.frontend.padding.rules.elementwise import ELEMENTWISE_RULES, elementwise, is_pointwise
from stof_tvm.frontend.padding.rules.indexing import INDEXING_RULES
from stof_tvm.frontend.padding.rules.products import PRODUCT_RULES
from stof_tvm.frontend.padding.rules.reductions import REDUCTION_RULES
from stof_tvm.frontend.padding.rules.rows import ROW_RULES
from stof_tvm.frontend.padding.rules.views import VIEW_RULES
from stof_tvm.frontend.padding.rules.windows import WINDOW_RULES

aten = torch.ops.aten
RULES: dict = {
    **ELEMENTWISE_RULES,
    **VIEW_RULES,
    **REDUCTION_RULES,
    **ROW_RULES,
    **PRODUCT_RULES,
    **ATTENTION_RULES,
    **WINDOW_RULES,
    **INDEXING_RULES,
}


# Operators whose rules read symbolic arguments.
OF_SIZES = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.repeat.default),
    *(aten.slice.Tensor, aten.select.int, aten.scalar_tensor.default, aten.constant_pad_nd.default),
    aten.native_group_norm.default,
    *(aten.full.default, aten.full_like.default, aten.ones.default, aten.zeros.default),
    *(aten.empty.memory_format, aten.empty_permuted.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step),
}


def rule_of(rewriter: Rewriter, node: torch.fx.Node) -> Callable:
    """The rule of a node's operator; UnsupportedError where there is none."""
    if rewriter.has_symbols(node) and not is_pointwise(node.target) and node.target not in OF_SIZES:
        raise rewriter.refuse(node, "an argument depends on sizes")
    if (rule := RULES.get(node.target)) is not None:
        return rule
    if is_pointwise(node.target):
        return elementwise
    raise rewriter.refuse(node, "nothing is known of how padding spreads through it")
