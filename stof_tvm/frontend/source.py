"""The exported program as PyTorch runs it, kept beside its import, to compare results."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx._lazy_graph_module import _LazyGraphModule


@dataclass(frozen=True)
class Source:
    """The parts of an ExportedProgram that are needed to run it; the importer changes the program, but not these.

    Attributes
    ----------
    graph_module : torch.fx.GraphModule
        Its graph is a copy of the program's, with the same names of nodes.
    graph_signature : ExportGraphSignature
    in_spec : torch.utils._pytree.TreeSpec
        The nesting of (args, kwargs).
    tensors : dict
        Parameters, buffers and constants by name; not copied.
    """

    graph_module: torch.fx.GraphModule
    graph_signature: ExportGraphSignature
    in_spec: Any
    tensors: dict[str, Any]


def source_of(program: ExportedProgram) -> Source:
    """The source of a program, before anything changes it."""
    graph_module, _ = copied_graph(program.graph_module)
    given = program.graph_signature
    signature = ExportGraphSignature(list(given.input_specs), list(given.output_specs))
    return Source(graph_module, signature, program.call_spec.in_spec, {**program.state_dict, **program.constants})


def copied_graph(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[str, torch.fx.Node]]:
    """(a copy of the graph that may be changed, its nodes by their names in `module`); parameters are not copied.

    The copy is compiled to Python when it is first called: many are changed again before, or only read.
    """
    graph, copies = torch.fx.Graph(), {}
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        new.name = old.name  # the copy of an input that is called `input`, as a function of Python is, is `input_1`
    return _LazyGraphModule(module, graph), {old.name: new for old, new in copies.items()}
