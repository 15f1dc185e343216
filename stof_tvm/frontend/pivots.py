"""Finds the softmaxes and exponentials of a graph that may turn an attention's scores into weights: these name sites.

Numbers tell the attention sites of one module apart.  Operators outside of attention (a head's log_softmax, a Gaussian)
must not shift these numbers.  The rule accepts more than is recognised as attention later: a matrix product of states
must come before the operator and another after it, without a barrier between.  A barrier is an operator that no scores
or weights go through.
"""

from collections.abc import Callable

PRODUCTS = {"matmul", "bmm", "mm", "baddbmm", "addmm", "addbmm", "einsum", "tensordot", "dot", "mv"}
BARRIERS = {"linear", "embedding", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm"}
BARRIERS |= {"conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"}


def may_be_attention(node) -> bool:
    """Whether an FX node of an exported program has a matrix product before it and one after it."""
    return _reaches_product(node, lambda x: x.all_input_nodes) and _reaches_product(node, lambda x: x.users)


def _reaches_product(node, neighbours: Callable) -> bool:
    pending, seen = [node], {node}
    while pending:
        for other in neighbours(pending.pop()):
            name = _name(other)
            if name in PRODUCTS or name in ("mul", "sum") and _sums_products(other):
                return True
            if other not in seen and name not in BARRIERS and other.op == "call_function":
                seen.add(other)
                pending.append(other)
    return False


def _sums_products(node) -> bool:
    """Whether a node multiplies two tensors and a sum reads the product, or is itself that sum."""
    if _name(node) == "mul":
        tensors = [x for x in node.all_input_nodes if hasattr(x.meta.get("val"), "dim")]
        return len(tensors) == 2 and any(_name(user) == "sum" for user in node.users)
    return any(_name(x) == "mul" and _sums_products(x) for x in node.all_input_nodes)


def _name(node) -> str:
    """The name of an ATen operator without its overload, such as "matmul"; "" for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2].removesuffix("_") if schema is not None else ""
