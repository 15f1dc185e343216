"""Which outputs are, or follow from, a choice among numbers: a rounding may then change them to anything.

The place of a largest element is another one altogether where two are nearly equal.  A count of elements above a
threshold, a sum or a rounded number changes by about as much as PyTorch's own result does.
"""

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

# Operators whose results are places of numbers by their order; of the pairs the second result is.
PLACES = {"argmax", "argmin", "argsort", "multinomial", "mode", "nonzero", "unique"}
PAIRS = {"cummax", "cummin", "kthvalue", "max", "median", "min", "nanmedian", "sort", "topk"}
# Operators that look up elements by such places, or by others that follow from floating-point numbers.
LOOKUPS = {"embedding", "gather", "index", "index_select", "take", "take_along_dim"}


def follows_from_a_choice(output: Node | object) -> bool:
    """Whether a result of an exported graph depends on places that floating-point numbers were ordered by.

    What floating-point numbers decide in other ways (an index that was computed from them, into a table of integers)
    counts as well.
    """
    if not isinstance(output, Node):
        return False
    seen, waiting = {output}, [output]
    while waiting:
        node = waiting.pop()
        if _is_choice(node):
            return True
        waiting += [x for x in node.all_input_nodes if x not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_choice(node: Node) -> bool:
    if node.target is operator.getitem:
        source, place = node.args
        return bool(place == 1) and isinstance(source, Node) and _name(source) in PAIRS
    name = _name(node)
    return name in PLACES or name in LOOKUPS and _has_integers([node]) and _has_integers(_places(node))


def _places(node: Node) -> list[Node]:
    """The inputs that say where elements are looked up, where they are not inputs of the model."""
    return [x for x in node.all_input_nodes[1:] if x.op == "call_function"]


def _has_integers(nodes: Iterable[Node]) -> bool:
    values = [node.meta.get("val") for node in nodes]
    return any(isinstance(x, torch.Tensor) and not x.is_floating_point() for x in values)


def _name(node: Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
