"""Module paths in TorchDynamo's graphs, written as torch.export writes them: "encoder.layer.0", "" for the model."""

import re

import torch

STACK = "nn_module_stack"  # in a node's meta: key -> (path, class) of each module whose call made it, outermost first
ROOT = {"": ("", "torch.nn.Module")}  # the entry that TorchDynamo leaves out
NAME = re.compile(r"""\[(['"])([^'"\]]+)\1\]""")
NUMBER = re.compile(r"\[(\d+)\]")


def with_plain_paths(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph, changed in place so that its nodes have plain paths."""
    for node in graph.graph.nodes:
        stack = {key: (_plain(path), kind) for key, (path, kind) in node.meta.get(STACK, {}).items()}
        node.meta[STACK] = {**ROOT, **stack}
    return graph


def run_with_paths(graph: torch.fx.GraphModule, args):
    """Run the graph; a tracer of this run copies the module paths of its nodes into the traced nodes."""
    with torch.fx.traceback.preserve_node_meta():
        return torch.fx.Interpreter(graph).run(*args)


def _plain(path: str) -> str:
    """`L['self'].layer[0]._modules['a']` as "layer.0.a"; a model that a function calls, `L['model']`, by its name."""
    path = re.sub(r"\._modules(?=\[)", "", path)
    path = NUMBER.sub(r".\1", NAME.sub(r".\2", path))
    return re.sub(r"^[LG]\.((self|fn)(\.|$))?", "", path)
