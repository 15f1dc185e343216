"""States: tensors that a model updates in place, its own buffers or its inputs, such as a cache of keys and values.

torch.export makes a program functional: it reads the old value of such a tensor, and the new value is one more result.
Here the buffers among them become inputs, and all new values the last results.  `relax_passes.runtime.update_states`
then lets kernels write into the tensors themselves.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import tvm
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from relax_passes.ir.bindings import BUFFERS, STATES
from stof_tvm.signature import Signature, StateSpec
from tir_kernels.errors import UnsupportedError

aten = torch.ops.aten
UPDATES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
RETURNED = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
LARGE = 4_000_000  # elements of a buffer
MOST_ENTRIES = 256  # of a buffer's first axis, that are compared: each takes a wait for a GPU
WRITTEN = "stof.writes_state"  # in a node's meta: it writes a part of a state, whose other elements stay


@dataclass(frozen=True)
class State:
    """An updated tensor: its name, the node that brings its value, and the node of its new value.

    `initial` is a copy of a buffer's value, on the CPU; None for an input of the caller's.  Where all entries along the
    first axis of a large buffer are the same it has one of them, expanded.
    """

    name: str
    node: str
    new: str
    initial: torch.Tensor | None = None


def lift_states(program: torch.export.ExportedProgram, kept: Collection[str] = ()) -> tuple[State, ...]:
    """Make updated buffers the program's last inputs and new values its last results, in place; returns the states.

    So are buffers named in `kept`, whose new value is the old one if the program only reads them.  Inputs of the caller
    come first among the states.  Raises UnsupportedError for an updated parameter, for a complex state, and for a new
    value of another dtype or shape.
    """
    signature, graph = program.graph_signature, program.graph
    nodes = {node.name: node for node in graph.nodes}
    states, buffers = [], {}
    for spec in signature.output_specs:
        if spec.kind not in UPDATES:
            if spec.kind not in RETURNED:
                raise UnsupportedError(f"the model updates its parameter {spec.target!r} in forward: make it a buffer")
            continue
        of_caller = spec.kind is OutputKind.USER_INPUT_MUTATION
        source = next(s for s in signature.input_specs if spec.target == (s.arg.name if of_caller else s.target))
        value = nodes[source.arg.name].meta["val"]
        new = nodes[spec.arg.name].meta["val"]
        if (new.dtype, new.shape) != (value.dtype, value.shape):
            raise UnsupportedError(
                f"the model updates {spec.target!r}, a {value.dtype} tensor of shape {tuple(value.shape)}, to one of "
                f"{new.dtype} and shape {tuple(new.shape)}: a state keeps its dtype and shape from call to call"
            )
        if value.is_complex():
            raise UnsupportedError(
                f"the model updates {spec.target!r}, which is complex: keep torch.view_as_real of it"
            )
        initial = None
        if source.kind is not InputKind.USER_INPUT:
            initial = _copied(_tensor(program, source.target))
            buffers[source.arg.name] = source
        states.append(State(str(spec.target), source.arg.name, spec.arg.name, initial))
    for source in signature.input_specs:
        if source.kind is InputKind.BUFFER and source.target in kept and source.arg.name not in buffers:
            initial = _copied(_tensor(program, source.target))
            buffers[source.arg.name] = source
            states.append(State(str(source.target), source.arg.name, source.arg.name, initial))
    # Buffers are inputs in the order of their placeholders.
    order = [node.name for node in graph.find_nodes(op="placeholder")]
    states.sort(key=lambda state: (state.initial is not None, order.index(state.node)))
    if not states:
        return ()
    _move_inputs(program, buffers)
    _move_outputs(program, states)
    for state in states:
        _mark_writes(graph, nodes[state.node], nodes[state.new])
    graph.lint()
    return tuple(states)


def note_states(mod: tvm.IRModule, program, outputs: int, states: tuple[State, ...]) -> tvm.IRModule:
    """The module imported of a program, with the places of its states among its parameters and results.

    The first `outputs` results are the caller's.
    """
    parameters = [parameter.name for parameter in mod["main"].params]
    results = [node.name for node in program.graph.output_node().args[0]]
    places = [(parameters.index(state.node), results.index(state.new)) for state in states]
    buffers = [state.node for state in states if state.initial is not None]
    mod["main"] = mod["main"].with_attr(STATES, json.dumps([outputs, places])).with_attr(BUFFERS, buffers)
    return mod


def with_states(signature: Signature, states: tuple[State, ...], copied: list[int | None]) -> Signature:
    """The signature with states; `copied` has the number of the result that is a state's new value, if there is one."""
    inputs, outputs = ([spec.name for spec in specs] for specs in (signature.inputs, signature.outputs))
    specs = []
    for state, result in zip(states, copied, strict=True):
        number = inputs.index(state.node) if state.initial is None else None
        of = signature.inputs[inputs.index(state.node)] if state.initial is None else state.initial
        dtype = str(of.dtype).removeprefix("torch.")
        output = outputs.index(state.new) if state.new in outputs else None
        specs.append(StateSpec(state.name, tuple(of.shape), dtype, number, result, output))
    return replace(signature, states=tuple(specs))


def _tensor(program, name: str) -> torch.Tensor:
    return program.state_dict[name] if name in program.state_dict else program.constants[name]


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    """What a State has of a buffer."""
    buffer = buffer.detach()
    is_looked_at = buffer.numel() > LARGE and 1 < len(buffer) <= MOST_ENTRIES
    if is_looked_at and all(torch.equal(buffer[0], entry) for entry in buffer[1:]):
        return buffer[:1].to("cpu", copy=True).contiguous().expand(buffer.shape)
    return buffer.to("cpu", copy=True).contiguous()


def _move_inputs(program, buffers: dict[str, InputSpec]) -> None:
    """Make buffers the last of the program's inputs."""
    specs, graph = program.graph_signature.input_specs, program.graph
    specs[:] = [spec for spec in specs if spec.arg.name not in buffers]
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="placeholder"):
        if node.name in buffers:
            spec = buffers[node.name]
            specs.append(InputSpec(InputKind.USER_INPUT, spec.arg, None))
            if node is not last:
                last.append(node)
                last = node
    # The importer looks each constant up among the inputs.  The dict may be that of another program, too.
    lifted = {spec.target for spec in buffers.values()}
    program._constants = {name: value for name, value in program.constants.items() if name not in lifted}


def _move_outputs(program, states: list[State]) -> None:
    """Make new values the last of the program's results."""
    specs, output = program.graph_signature.output_specs, program.graph.output_node()
    pairs = list(zip(specs, output.args[0], strict=True))
    own = [(spec, x) for spec, x in pairs if spec.kind not in UPDATES]
    nodes = {node.name: node for node in program.graph.nodes}
    moved = [(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=s.new), None), nodes[s.new]) for s in states]
    specs[:] = [spec for spec, _ in own + moved]
    output.args = (tuple(x for _, x in own + moved),)


def _mark_writes(graph: torch.fx.Graph, old: torch.fx.Node, new: torch.fx.Node) -> None:
    """Mark the nodes between a state's old value and its new one that write a part of it."""
    while new is not old and new.op == "call_function" and new.args and isinstance(new.args[0], torch.fx.Node):
        if new.target in WRITERS:
            new.meta[WRITTEN] = True
        elif new.target not in VIEWS:
            break
        new = new.args[0]


VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)  # a write through one writes a part, too
WRITERS = (aten.index_put.default, aten.index_copy.default, aten.slice_scatter.default, aten.select_scatter.default)
