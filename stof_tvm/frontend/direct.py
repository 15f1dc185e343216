"""Exported programs that the converters can take as torch.export gives them, without tracing them a second time.

`decompose` traces a program again, which takes longer than exporting it.  What it would change in a Transformer is
little: operators that are another one by a different name, for which there are converters, and a few in-place sums.
"""

import operator
from collections.abc import Container

import torch
from torch.export import ExportedProgram

from stof_tvm.frontend.operators.elementwise.complex import COMPLEX_CONVERTERS
from stof_tvm.frontend.operators.table import OURS

# Decomposed otherwise, though TVM's converter of the whole operator does the same.
AS_THEY_ARE = ("silu.default",)


def make_direct(program: ExportedProgram, converters: Container[str]) -> bool:
    """Whether the converters can take `program`, which is changed for it: a program of `export_model`, nobody else's.

    Otherwise `decompose` must come before them.  `converters` are the names of all operators that have one.
    """
    graph = program.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in place:
        if _is_operator(node) and node.target._schema.is_mutable and not _take_out_of_place(node, place):
            return False
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # of what `Importer` checks as well
    graph.eliminate_dead_code()
    return all(_is_convertible(node, converters) for node in graph.nodes if node.op == "call_function")


def _is_convertible(node, converters) -> bool:
    if not _is_operator(node):
        return node.target is operator.getitem
    name = node.target.__name__
    is_core = torch.Tag.core in node.target.tags and name in converters
    return name in OURS or name in COMPLEX_CONVERTERS or is_core or (name in AS_THEY_ARE and not node.kwargs)


def _take_out_of_place(node, place: dict) -> bool:
    """Make `x.add_(y)` a sum, which whatever reads x later reads instead; False where another tensor may share x."""
    functional = _functional(node.target)
    x = node.args[0] if node.args else None
    if functional is None or not isinstance(x, torch.fx.Node) or not _is_new(x) or _is_mixed(node):
        return False
    later = [user for user in x.users if place[user] > place[node]]
    earlier = [user for user in x.users if place[user] < place[node]]
    if any(user.op == "output" for user in later) or not all(map(_is_new, earlier)):
        return False
    node.target = functional
    x.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return True


def _functional(target):
    """aten.add.Tensor for aten.add_.Tensor; None for what changes something else than its first argument."""
    name = target._opname
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)


def _is_mixed(node) -> bool:
    """Whether its tensors differ in dtype: the sum would have the wider one, x keeps its own."""
    return len({getattr(x.meta.get("val"), "dtype", None) for x in node.all_input_nodes}) > 1


def _is_new(node) -> bool:
    """Whether a node's result has memory of its own for sure."""
    if not _is_operator(node) or torch.Tag.core not in node.target.tags:
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)


def _is_operator(node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
