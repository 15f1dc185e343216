"""A graph that no engine can be built for, in eager PyTorch, with one warning that says why."""

import copy
import warnings

import torch

from stof_tvm.dynamo.graph import DynamoGraph
from stof_tvm.running.states import SharedMemoryError
from tir_kernels.errors import CompileError, ExportError, UnsupportedError

# Of the graph, not of how it is compiled; or tensors that a graph updates share memory in the program around it.
CANNOT_BE_BUILT = (UnsupportedError, ExportError, CompileError, SharedMemoryError)
LONGEST = 500  # characters of a reason


class GraphOrEager:
    """A `DynamoGraph` that becomes the graph itself where the compiler cannot build it.

    Only for a graph without a mask of the user's: eager PyTorch would not apply it.  Wrong numbers, wrong options and
    what `strict` asks for stay errors.
    """

    def __init__(self, graph: torch.fx.GraphModule, example_inputs, options: dict):
        self._eager = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # DynamoGraph changes its own
        self._compiled: DynamoGraph | None = DynamoGraph(graph, example_inputs, options)

    def __call__(self, *args):
        if (compiled := self._compiled) is not None:
            try:
                return compiled(*args)
            except CANNOT_BE_BUILT as error:
                self._compiled = None
                _warn(error)
        return self._eager(*args)


def _warn(error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "; ".join(lines[:3])
    reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}…"
    warnings.warn(
        "torch.compile(backend='stof') runs a graph in eager PyTorch, for which no engine can be built "
        f"(fullgraph=True makes this an error): {type(error).__name__}: {reason}",
        stacklevel=3,
    )
