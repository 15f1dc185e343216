"""Engines for a graph of TorchDynamo's: one for each set of shapes and scalars that the graph is called with."""

import threading
from collections import OrderedDict

import torch

from stof_tvm.compiler import build
from stof_tvm.dynamo.growing import grows
from stof_tvm.dynamo.numbers import number_of, take_numbers_out
from stof_tvm.dynamo.paths import run_with_paths, with_plain_paths
from stof_tvm.dynamo.told import names_of, tell
from tir_kernels.errors import UnsupportedError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
MOST_ENGINES = 64  # most engines that a graph keeps; the least recently called one is dropped


class DynamoGraph:
    """The callable that the backend returns to TorchDynamo: from the graph's inputs to a sequence of its outputs.

    Parameters, activations, what the graph updates and other tensors are inputs of the engines.  Sizes, and numbers
    that TorchDynamo passes as numbers or as 0-dimensional tensors, are constants: a call with others builds another
    engine, if a tensor depends on them.  Buffers, which may hold masks, are constants, too; they are compared at every
    call, and a changed one builds another engine.  One that a call puts new rows to is an input: it changes each time.
    """

    def __init__(self, graph: torch.fx.GraphModule, example_inputs, options: dict):
        self._graph, self._options = with_plain_paths(graph), options
        placeholders = graph.graph.find_nodes(op="placeholder")
        static = [i for i, node in enumerate(placeholders) if _is_static(node) and not _is_updated(node)]
        static = [i for i in static if not (example_inputs[i].numel() and grows(placeholders[i]))]  # no empty inputs
        self._parameters = {i for i in static if isinstance(example_inputs[i], torch.nn.Parameter)}
        blocks = {i for i, node in enumerate(placeholders) if _is_of_a_block_mask(node)}
        self._buffers: dict[int, _Known | None] = {i: None for i in sorted({*static, *blocks} - self._parameters)}
        self._numbers = {i for i, node in enumerate(placeholders) if _is_number(node)} - set(static)
        self._engines: OrderedDict = OrderedDict()
        self._is_compiled = False  # whether there was an engine
        self._lock = threading.RLock()
        self._takes_numbers()
        self._number_results = take_numbers_out(self._graph)
        self._placeholders = self._graph.graph.find_nodes(op="placeholder")
        self._unread = {i for i, node in enumerate(self._placeholders) if not node.users}

    def __call__(self, *given):
        args = [x.item() if i in self._numbers and isinstance(x, torch.Tensor) else x for i, x in enumerate(given)]
        read = [i for i, x in enumerate(args) if i not in self._unread or isinstance(x, torch.Tensor)]
        key = tuple(
            tuple(x.shape) if isinstance(x, torch.Tensor) else (type(x), repr(x)) for x in (args[i] for i in read)
        )
        with self._lock:
            is_changed = not all(_is_unchanged(known, args[i]) for i, known in self._buffers.items())
            if is_changed:
                self._engines.clear()
                self._buffers = {i: _Known(args[i]) for i in self._buffers}
            engine = self._engines.get(key)
            if engine is None:
                last = next(reversed(self._engines), None)
                names = names_of([self._placeholders[i] for i in read])
                tell(names, key, last, len(self._engines), is_changed and self._is_compiled)
                engine = self._build(args)
                self._is_compiled = True
            self._engines[key] = engine
            self._engines.move_to_end(key)
            if len(self._engines) > MOST_ENGINES:
                self._engines.popitem(last=False)
        results = engine(args)
        if all(node is None for node in self._number_results):
            return results
        values, own = dict(zip(self._placeholders, args)), iter(results)
        return tuple(next(own) if node is None else number_of(node, values) for node in self._number_results)

    def _build(self, args):
        """A function of the graph's inputs: an engine's call."""
        if not any(isinstance(x, torch.Tensor) for x in self._results()):
            if self._options.get("mask") is not None and any(map(_is_updated, self._placeholders)):
                raise UnsupportedError("the graph returns nothing, and only updates tensors: return one of them")
            return lambda given: self._graph(*given)  # results are sizes: nothing to compute
        tensors = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and i not in self._buffers]
        model = _WithConstants(self._graph, args, tensors).eval()
        on_gpu = next((args[i].device for i in tensors if args[i].device.type == "cuda"), None)
        moved = () if on_gpu is None else {i for i in tensors if args[i].device.type == "cpu"}
        if moved:
            self._check_moved(moved)
            args = [x.to(on_gpu) if i in moved else x for i, x in enumerate(args)]
        options = {"target": "llvm" if on_gpu is None else None, **self._options}
        engine = build(model, example_inputs=tuple(self._example(i, args[i]) for i in tensors), **options)
        if updated := model.numbers_of(state.name for state in engine.signature.states if state.input is None):
            # TorchDynamo did not see it (a batch norm that trains): an engine of the buffers themselves, not of copies.
            self._buffers = {i: known for i, known in self._buffers.items() if i not in updated}
            return self._build(args)
        engine.inputs_in_place = frozenset(n for n, i in enumerate(tensors) if i in self._parameters)
        return lambda given: engine(*(given[i].to(on_gpu) if i in moved else given[i] for i in tensors))

    def _check_moved(self, moved: set[int]) -> None:
        """Tensors of the CPU among a GPU's, such as numbers, are copied to it; UnsupportedError where that is wrong."""
        name = self._placeholders[min(moved)].name
        if any(_is_updated(self._placeholders[i]) for i in moved):
            raise UnsupportedError(f"the graph updates tensors on the CPU beside tensors on a GPU, such as {name}")
        results = (node.meta.get("example_value") for node in self._graph.graph.output_node().all_input_nodes)
        if any(isinstance(result, torch.Tensor) and result.device.type == "cpu" for result in results):
            raise UnsupportedError(f"the graph returns tensors on the CPU beside tensors on a GPU; it reads {name}")

    def _example(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """An example input for `build`; a parameter of the model is passed as an nn.Parameter."""
        return torch.nn.Parameter(x.detach(), requires_grad=False) if number in self._parameters else x.detach()

    def _results(self):
        results = self._graph.graph.output_node().all_input_nodes
        return [node.meta.get("example_value", torch.empty(0)) for node in results]

    def _takes_numbers(self) -> None:
        """Let the graph take Python numbers for the 0-dimensional tensors on which it only calls `item()`."""
        for i, node in enumerate(self._graph.graph.find_nodes(op="placeholder")):
            if i in self._numbers:
                for user in list(node.users):
                    user.replace_all_uses_with(node)
                    self._graph.graph.erase_node(user)
        self._graph.recompile()


class _WithConstants(torch.nn.Module):
    """The graph as a model of the inputs numbered `inputs`; tensors among the other inputs are its buffers."""

    def __init__(self, graph: torch.fx.GraphModule, args, inputs: list[int]):
        super().__init__()
        self.graph_module = graph
        self.inputs = inputs
        self.numbers = {i: x for i, x in enumerate(args) if not isinstance(x, torch.Tensor)}
        self.buffer_numbers = [i for i in range(len(args)) if i not in self.numbers and i not in inputs]
        for i in self.buffer_numbers:
            self.register_buffer(f"input_{i}", args[i].detach())

    def numbers_of(self, names) -> set[int]:
        """The numbers of the inputs that are the buffers of these names."""
        names = set(names)
        return {i for i in self.buffer_numbers if f"input_{i}" in names}

    def forward(self, *inputs):
        values = {**self.numbers, **dict(zip(self.inputs, inputs))}
        values |= {i: getattr(self, f"input_{i}") for i in self.buffer_numbers}
        return run_with_paths(self.graph_module, [values[i] for i in range(len(values))])


class _Known:
    """A buffer as it was when the engines were built.

    PyTorch counts a tensor's changes, except those through `.data`, so on a CPU the contents are compared as well.
    """

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # keeps the memory alive, so that no other tensor can have its address
        self.version = None if tensor.is_inference() else tensor._version
        self.contents = _bits(tensor).clone() if tensor.device.type == "cpu" or self.version is None else None


def _is_unchanged(known: _Known | None, tensor) -> bool:
    if known is None or known.tensor.data_ptr() != tensor.data_ptr() or known.tensor.shape != tensor.shape:
        return False
    if known.version != (None if tensor.is_inference() else tensor._version):
        return False
    return known.contents is None or torch.equal(known.contents, _bits(tensor))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_number(placeholder: torch.fx.Node) -> bool:
    """Whether the graph only calls `item()` on an input: a float that is not the same at every call."""
    users = list(placeholder.users)
    return bool(users) and all(user.op == "call_method" and user.target == "item" for user in users)


def _is_of_a_block_mask(placeholder) -> bool:
    """Whether an input is only there for the blocks of a FlexAttention mask, the same ones at nearly every call."""
    flex = torch.ops.higher_order.flex_attention
    return bool(placeholder.users) and all(
        user.target is flex and placeholder in user.args[4] for user in placeholder.users
    )


def _is_updated(placeholder: torch.fx.Node) -> bool:
    """Whether the graph writes into an input: TorchDynamo did so with a tensor that stands for it, which counts."""
    example = placeholder.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.is_inference() and example._version > 0


def _is_static(placeholder: torch.fx.Node) -> bool:
    """Whether TorchDynamo lifted a parameter or buffer of the model into this input."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})
