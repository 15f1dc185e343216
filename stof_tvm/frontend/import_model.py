"""From a PyTorch model to Relax with attention kept whole."""

from dataclasses import dataclass

import torch
import tvm
from torch.export.graph_signature import ConstantArgument, InputKind

from stof_tvm.frontend.direct import make_direct
from stof_tvm.frontend.export import decompose, example_inputs, export_model
from stof_tvm.frontend.importer import Importer
from stof_tvm.signature import Signature, read_signature
from tir_kernels.errors import InputError


@dataclass(frozen=True)
class ImportedModel:
    """`mod["main"]` takes `signature.inputs` and returns a tuple of `signature.outputs`; parameters are constants."""

    mod: tvm.IRModule
    signature: Signature


def import_model(model, example_args=(), example_kwargs=None) -> ImportedModel:
    """Import a `torch.nn.Module` or a `torch.export.ExportedProgram`.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        A module is exported in evaluation mode; its modes, parameters and buffers stay as they were.
    example_args, example_kwargs : tuple and dict, optional
        Inputs to export a module with; their shapes, dtypes and constants become the signature.  Left out, the
        module's own `example_inputs` or `dummy_inputs` are taken.

    Raises
    ------
    InputError
        `model` is neither, or has no example inputs.
    ExportError
        torch.export refuses the model; its message is kept.
    UnsupportedError
        An operator without converter, active dropout, random numbers, updates of buffers or inputs, dynamic shapes.
    """
    importer = Importer()
    if isinstance(model, torch.export.ExportedProgram):
        program, forward = decompose(model), None
    elif isinstance(model, torch.nn.Module):
        program = export_model(model, *example_inputs(model, example_args, example_kwargs))
        program = program if make_direct(program, importer.convert_map) else decompose(program)
        forward = model.forward
    else:
        raise InputError(f"a model is a torch.nn.Module or a torch.export.ExportedProgram, got {type(model).__name__}")
    signature = read_signature(program, forward)
    _drop_constants(program)
    return ImportedModel(importer.from_exported_program(program, False, False, False, None), signature)


def _drop_constants(program):
    """Leave only distinct tensors among the program's inputs and outputs: TVM's importer knows nothing else."""
    specs = program.graph_signature
    constant = [s for s in specs.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, ConstantArgument)]
    names = {spec.arg.name for spec in constant}
    for node in list(program.graph.find_nodes(op="placeholder")):
        if node.name in names:
            program.graph.erase_node(node)
    specs.input_specs[:] = [spec for spec in specs.input_specs if spec not in constant]
    output = program.graph.output_node()
    tensors = dict.fromkeys(x for x in output.args[0] if isinstance(x, torch.fx.Node))
    output.args = (tuple(tensors),)
    kept = {}
    for spec in specs.output_specs:
        if not isinstance(spec.arg, ConstantArgument):
            kept.setdefault(spec.arg.name, spec)
    specs.output_specs[:] = kept.values()
    program.range_constraints.clear()  # of symbols that no shape has any more
