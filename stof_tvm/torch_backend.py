"""`torch.compile(model, backend="stof", dynamic=False)`: TorchDynamo's graphs compiled to engines."""

import torch

from stof_tvm.compiler import build
from tir_kernels.errors import InputError, UnsupportedError

OPTIONS = ("mask", "target", "strict")


def stof(graph: torch.fx.GraphModule, example_inputs, *, options: dict | None = None):
    """TorchDynamo's backend: parameters and buffers are bound into the engine, the other inputs stay inputs.

    `options` takes `mask`, `target` and `strict` of `stof_tvm.build`.  Inference only, static shapes only.
    """
    options = dict(options or {})
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise InputError(f"backend options {unknown} are unknown; there are {sorted(OPTIONS)}")
    if any(isinstance(x, torch.SymInt) for x in example_inputs):
        raise UnsupportedError(
            'backend "stof" needs static shapes: torch.compile(model, backend="stof", dynamic=False)'
        )
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    bound = {i: x for i, x in enumerate(example_inputs) if _is_static(placeholders[i], x)}
    free = [i for i in range(len(example_inputs)) if i not in bound]
    device = next((x.device.type for x in example_inputs if isinstance(x, torch.Tensor)), "cpu")
    options.setdefault("target", None if device == "cuda" else "llvm")
    model = _BoundGraph(graph, bound, len(example_inputs)).eval()
    engine = build(model, example_inputs=tuple(example_inputs[i].detach() for i in free), **options)

    def run(*args):
        return engine(*(args[i] for i in free))

    return run


class _BoundGraph(torch.nn.Module):
    """The graph with some of its inputs turned into buffers."""

    def __init__(self, graph: torch.fx.GraphModule, bound: dict[int, torch.Tensor], n_inputs: int):
        super().__init__()
        self.graph_module = graph
        self.n_inputs = n_inputs
        self.bound = sorted(bound)
        for i, x in bound.items():
            self.register_buffer(f"input_{i}", x.detach())

    def forward(self, *args):
        free = iter(args)
        bound = set(self.bound)
        return self.graph_module(
            *(getattr(self, f"input_{i}") if i in bound else next(free) for i in range(self.n_inputs))
        )


def _is_static(placeholder: torch.fx.Node, value) -> bool:
    """Whether Dynamo lifted a parameter or buffer of the model into this input."""
    return isinstance(value, torch.nn.Parameter) or "_dynamo_static_input_type" in placeholder.meta.get(
        "tensor_dict", {}
    )
