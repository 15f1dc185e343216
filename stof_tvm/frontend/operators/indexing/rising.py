"""Positions from one on that is known at run time: no two are the same, so all of them may be written at once.

first * width + torch.arange(n)        where a prompt's keys begin in a cache
"""

import torch
from torch.fx import Node, map_arg

aten = torch.ops.aten
# They leave elements in their order.
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.alias.default, aten.clone.default)
MOST = 1 << 26  # elements that are computed to be looked at


def is_rising(node, n: int) -> bool:
    """Whether each value of an FX node is greater than the one before, and the last less than n above the first.

    Known are int64 numbers that the graph computes of none of its inputs, plus one number of any call.
    """
    while isinstance(node, Node) and node.target in VIEWS:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    for known, number in (node.args, node.args[::-1]):
        if not isinstance(known, Node) or not isinstance(number, Node) or number.meta["val"].numel() != 1:
            continue
        values = _computed(known)
        if values is not None and values.dtype == node.meta["val"].dtype == torch.int64:
            values = values.flatten()
            return bool((values.diff() > 0).all()) and int(values[-1] - values[0]) < n
    return False


def _computed(node: Node) -> torch.Tensor | None:
    """The tensor that a node is in every call, on the CPU; None where it depends on an input or on chance."""
    value = node.meta.get("val")
    is_operator = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in (
        node.target.tags
    )
    if not is_operator or not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MOST:
        return None
    operands = {x: _computed(x) for x in node.all_input_nodes}
    if any(x is None for x in operands.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), operands.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return node.target(*args, **kwargs)  # type: ignore[operator]  # it is an operator's node
