"""Where a call of PyTorch's graph writes the keys of an attention into a cache: the node of their positions.

The search goes from the keys, or where an attention is written out, from its scores, through what leaves positions
where they are.  It ends at writes.
"""

import math

import torch
from torch.fx import Node

aten = torch.ops.aten
WRITES = (aten.index_put.default, aten.index_copy.default)
THROUGH = {
    *("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "repeat"),
    *("repeat_interleave", "flatten", "unflatten", "clone", "alias", "detach", "to", "_to_copy", "contiguous"),
    *("matmul", "bmm", "mm", "baddbmm", "einsum", "mul", "div", "add", "sub", "neg", "tanh", "where", "masked_fill"),
    *("amax", "max", "softmax", "_softmax", "exp"),
}


def positions_of(start: Node, count: int) -> Node | None:
    """The node of the positions, `count` of them, at which keys that `start` reads were written; None if not one."""
    found: set[Node | None] = set()
    seen: set[Node] = set()
    pending = [start]
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in WRITES:
            found.add(_index(node))
        elif getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in THROUGH:
            pending += node.all_input_nodes
    (index,) = found if len(found) == 1 else (None,)
    return index if index is not None and math.prod(index.meta["val"].shape) == count else None


def _index(write: Node) -> Node | None:
    """The positions of a write along one dimension."""
    index = write.args[2] if write.target is aten.index_copy.default else write.args[1]
    given = [x for x in index if x is not None] if isinstance(index, tuple | list) else [index]
    return given[0] if len(given) == 1 and isinstance(given[0], Node) else None
