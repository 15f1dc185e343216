"""An exported program with dynamic shapes, at one set of shapes.

The graph is copied, the weights are not.  Sizes that the graph computes become numbers, and what the program asserts
about them is checked.  Modules' paths and the names of nodes stay.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
)
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from stof_tvm.frontend.source import copied_graph
from tir_kernels.errors import InputError, UnsupportedError

NUMBERS = SymIntArgument, SymFloatArgument, SymBoolArgument  # results that are numbers of the shapes
SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool


def specialised(program: torch.export.ExportedProgram, numbers: Mapping) -> torch.export.ExportedProgram:
    """The program with a number for each symbol of its shapes; it shares weights, buffers and constants with `program`.

    Raises InputError where an assertion about shapes fails, UnsupportedError for sizes that depend on values.
    """
    module, found = _specialised_graph(program.graph_module, numbers, FakeTensorMode(allow_non_fake_inputs=True))
    given = program.graph_signature
    outputs = [
        dataclasses.replace(spec, arg=ConstantArgument(name="", value=found[spec.arg.name]))
        if isinstance(spec.arg, NUMBERS)
        else spec
        for spec in given.output_specs
    ]
    return torch.export.ExportedProgram(
        module,
        module.graph,
        ExportGraphSignature(list(given.input_specs), outputs),
        program.state_dict,
        {},
        program.module_call_graph,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _specialised_graph(given: torch.fx.GraphModule, numbers: Mapping, mode) -> tuple[torch.fx.GraphModule, dict]:
    """(a copy of a module's graph and of its graphs' for higher-order operators, the numbers that nodes became)."""
    module, _ = copied_graph(given)
    found: dict[torch.fx.Node, Any] = {}

    def with_found(operand):
        return found.get(operand, operand)

    for node in module.graph.nodes:
        node.args, node.kwargs = (map_arg(x, with_found) for x in (node.args, node.kwargs))
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SYMBOLIC):
            found[node] = _computed(node)
        elif node.op == "call_function" and node.target is torch.ops.aten._assert_scalar.default:
            _check(node)
            found[node] = None
        elif value is not None:
            node.meta["val"] = pytree.tree_map(lambda x: _with_numbers(x, numbers, mode), value)
        node.meta.pop("unbacked_bindings", None)
        node.meta.pop("tensor_meta", None)  # of the symbolic sizes
    for node in reversed(found):
        module.graph.erase_node(node)
    for name, child in list(module.named_children()):
        if isinstance(child, torch.fx.GraphModule):
            setattr(module, name, _specialised_graph(child, numbers, mode)[0])
    module.recompile()
    return module, {node.name: value for node, value in found.items()}


def _computed(node: torch.fx.Node):
    """The number that a node has, whose operands have theirs."""
    operands = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    try:
        return node.target(*operands[0], **operands[1])  # type: ignore[operator]  # it is a function's node
    except Exception as error:  # PyTorch's, for what depends on values
        raise UnsupportedError(
            f"the model computes with numbers that it takes from tensors, such as a length from a mask ({node.name}): "
            "an engine's shapes and branches are fixed"
        ) from error


def _check(node: torch.fx.Node) -> None:
    holds, told = node.args[0], node.args[1] if len(node.args) > 1 else ""
    if not isinstance(holds, torch.fx.Node) and not holds:
        raise InputError(f"the program does not take inputs of these shapes: {told}")


def _with_numbers(value, numbers: Mapping, mode: FakeTensorMode):
    """What a node's result is, at these sizes; a program's tensors must all be of one mode."""
    if isinstance(value, torch.Tensor):
        shape, stride = ([_number(n, numbers) for n in sizes] for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return _number(value, numbers) if isinstance(value, torch.SymInt) else value


def _number(size, numbers: Mapping) -> int:
    if isinstance(size, int):
        return size
    value = size.node.expr.subs(numbers)
    if not value.is_number:
        raise UnsupportedError(f"the program has a size {size} that depends on values, which an engine cannot have")
    return int(value)
