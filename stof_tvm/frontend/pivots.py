"""Which softmaxes and exponentials of a graph may turn an attention's scores into weights: these name sites.

Attention sites of one module are told apart by numbers, which what is no attention (a head's log_softmax, a Gaussian)
must not shift.  The rule is wider than what is recognised later: between two matrix products of states, as far as
operators that no scores or weights go through do not stand between.
"""

from collections.abc import Callable

PRODUCTS = {"matmul", "bmm", "mm", "baddbmm", "addmm", "addbmm", "einsum", "tensordot", "dot", "mv"}
BARRIERS = {"linear", "embedding", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm"}
BARRIERS |= {"conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"}


def may_be_attention(node) -> bool:
    """Whether an FX node of an exported program has a product before it and one behind it."""
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
    """Whether this is a product of two tensors of which a dimension is summed up, or that sum."""
    if _name(node) == "mul":
        tensors = [x for x in node.all_input_nodes if hasattr(x.meta.get("val"), "dim")]
        return len(tensors) == 2 and any(_name(user) == "sum" for user in node.users)
    return any(_name(x) == "mul" and _sums_products(x) for x in node.all_input_nodes)


def _name(node) -> str:
    """The name of an ATen operator without its overload, such as "matmul"; "" for other nodes."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2].removesuffix("_") if schema is not None else ""
