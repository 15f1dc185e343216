"""Exported programs that the converters can take as torch.export gives them, without tracing them a second time.

`decompose` traces a program again, which takes longer than exporting it.  It changes little in a Transformer: it
renames operators that have converters anyway, and replaces a few in-place sums.
"""

import operator
from collections.abc import Container

import torch
from torch.export import ExportedProgram

from stof_tvm.frontend.operators.elementwise.complex import COMPLEX_CONVERTERS
from stof_tvm.frontend.operators.table import OURS

# Exceptions from the rule below: TVM's converter of the whole operator computes what its decomposition does.
AS_THEY_ARE = ("silu.default",)
# Operators that PyTorch does not count among its core, and that always give memory of their own.
UNFILLED = (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default, torch.ops.aten.empty_permuted.default)

PREDISPATCH = "torch._functorch.predispatch"


def try_direct(program: ExportedProgram, converters: Container[str]) -> bool:
    """Change `program` in place so that the converters can take it; returns whether they can.

    If not, `decompose` must run first.  `program` comes from `export_model`: nobody else may hold it.  `converters` are
    the names of all operators that have a converter.
    """
    graph = program.graph
    # Calls that nobody reads open and close the levels of torch.vmap: they are no dead code.
    if any(getattr(node.target, "__module__", "") == PREDISPATCH for node in graph.nodes):
        return False
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in place:
        if _is_operator(node) and node.target._schema.is_mutable and not _take_out_of_place(node, place):
            return False
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # `Importer` checks the metadata as well
    graph.eliminate_dead_code()
    return all(_is_convertible(node, converters) for node in graph.nodes if node.op == "call_function")


def _is_convertible(node, converters) -> bool:
    if not _is_operator(node):
        return node.target is operator.getitem
    name = node.target.__name__
    is_core = torch.Tag.core in node.target.tags and name in converters
    return name in OURS or name in COMPLEX_CONVERTERS or is_core or (name in AS_THEY_ARE and not node.kwargs)


def _take_out_of_place(node, place: dict) -> bool:
    """Replace `x.add_(y)` by a sum that later readers of x read; False where another tensor may share x's memory."""
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
    """aten.add.Tensor for aten.add_.Tensor; None for a target without such a counterpart."""
    name = target._opname
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    return getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)


def _is_mixed(node) -> bool:
    """Whether the node's tensors differ in dtype: `x + y` would have the wider dtype, `x.add_(y)` has that of x."""
    return len({getattr(x.meta.get("val"), "dtype", None) for x in node.all_input_nodes}) > 1


def _is_new(node) -> bool:
    """Whether a node's result has memory of its own for sure."""
    if node.target in UNFILLED:
        return True
    if not _is_operator(node) or torch.Tag.core not in node.target.tags:
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)


def _is_operator(node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
