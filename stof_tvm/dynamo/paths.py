"""Module paths in TorchDynamo's graphs, written as torch.export writes them: "encoder.layer.0", "" for the model."""

import re

import torch

STACK = "nn_module_stack"  # in a node's meta: key -> (path, class) of each module whose call made it, outermost first
ROOT = {"": ("", "torch.nn.Module")}  # the entry that TorchDynamo leaves out
NAME = re.compile(r"""\[(['"])([^'"\]]+)\1\]""")
NUMBER = re.compile(r"\[(\d+)\]")
LOCAL = re.compile(r"^L\[(['\"])(\w+)\1\](?=(.?))")
# The outermost function of a node's stack trace, which is what TorchDynamo compiles, or what it goes on with.
FORWARD = re.compile(r", in (torch_dynamo_resume_in_)?forward(_at_\d+)?\s*$", re.MULTILINE)
OUTERMOST = re.compile(r", in .*$", re.MULTILINE)


def with_plain_paths(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph, changed in place so that its nodes have plain paths."""
    own = _own_name(graph)
    for node in graph.graph.nodes:
        stack = {key: (_plain(path, own), kind) for key, (path, kind) in node.meta.get(STACK, {}).items()}
        node.meta[STACK] = {**ROOT, **stack}
    return graph


def run_with_paths(graph: torch.fx.GraphModule, args):
    """Run the graph; a tracer of this run copies the module paths of its nodes into the traced nodes."""
    with torch.fx.traceback.preserve_node_meta():
        return torch.fx.Interpreter(graph).run(*args)


def _own_name(graph: torch.fx.GraphModule) -> str:
    """What a `forward` that is compiled calls its model: its first parameter, mostly "self".

    It is the one local variable whose modules are called, and which is not called itself.
    """
    found = set()
    for node in graph.graph.nodes:
        paths = [path for path, _ in node.meta.get(STACK, {}).values()]
        local = [match for path in paths if (match := LOCAL.match(path))]
        outermost = OUTERMOST.search(node.meta.get("stack_trace") or "")
        is_other = outermost is not None and FORWARD.match(outermost[0]) is None  # of a function
        if any(not match[3] for match in local) or local and is_other:
            return "self"
        found |= {match[2] for match in local}
    return found.pop() if len(found) == 1 else "self"


def _plain(path: str, own: str = "self") -> str:
    """`L['self'].layer[0]._modules['a']` as "layer.0.a"; a model that a function calls, `L['model']`, by its name."""
    path = re.sub(r"\._modules(?=\[)", "", path)
    path = NUMBER.sub(r".\1", NAME.sub(r".\2", path))
    return re.sub(rf"^[LG]\.((self|fn|{own})(\.|$))?", "", path)
