"""From a PyTorch model to Relax with attention kept whole."""

import copy
import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
import tvm
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from relax_passes.ir.bindings import WEIGHTS
from stof_tvm.dynamo.autocast import refuse_autocast
from stof_tvm.frontend.direct import try_direct
from stof_tvm.frontend.export import decompose, example_inputs, export_model
from stof_tvm.frontend.exportable import transformers_cache, transformers_experts
from stof_tvm.frontend.exportable.windowed_attention import global_tokens, note
from stof_tvm.frontend.flex import FLEX, rewrite_flex_attention
from stof_tvm.frontend.importer import Importer
from stof_tvm.frontend.operators.elementwise.complex import make_constants_real
from stof_tvm.frontend.source import Source, source_of
from stof_tvm.frontend.states import State, lift_states, note_states
from stof_tvm.signature import Signature, read_signature
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class ImportedModel:
    """`mod["main"]` takes `signature.inputs` and returns a tuple of `signature.outputs`; parameters are constants.

    After these inputs it takes the buffers among `states`, and after these outputs it returns the states' new values,
    except those that are outputs, too.

    `program` is what was imported, `source` the same program as PyTorch runs it.  `site_nodes` maps the path of a site
    to the name of the node, in both, that spells its attention or softmax.  `notes` say where the import differs from
    the model.  `has_flex` says that the model uses FlexAttention.  Its import applies the blocks of the mask, as
    PyTorch's compiled kernels do; eager PyTorch applies the mask_mod only.
    """

    mod: tvm.IRModule
    signature: Signature
    program: torch.export.ExportedProgram
    source: Source
    site_nodes: dict[str, str]
    notes: tuple[str, ...] = ()
    has_flex: bool = False
    states: tuple[State, ...] = ()


@one_at_a_time
def import_model(
    model,
    example_args=(),
    example_kwargs=None,
    *,
    kept: Collection[str] = (),
    owned: bool = False,
    shares: bool = False,
) -> ImportedModel:
    """Import a `torch.nn.Module` or a `torch.export.ExportedProgram`.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        A module is exported in evaluation mode; its modes, parameters and buffers stay as they were.
    example_args, example_kwargs : tuple and dict, optional
        Inputs to export a module with; their shapes, dtypes and constants become the signature.  Default: the
        module's own `example_inputs` or `dummy_inputs`.
    kept : collection of str
        Names of buffers that are states even if this model only reads them, since another updates them.
    owned : bool
        Whether an ExportedProgram, of fixed shapes, may be changed.
    shares : bool
        Whether the module's constants may be a program's tensors themselves, which nobody writes to later.

    Raises
    ------
    InputError
        `model` is neither of these types, or has no example inputs.
    ExportError
        torch.export refuses the model; its message is kept.
    UnsupportedError
        An operator without converter, active dropout, random numbers, updates of parameters, dynamic shapes.
    """
    if isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        refuse_meta(model)
        refuse_autocast(model.parameters(), "build the engine")
    if isinstance(example_args, torch.Tensor):
        example_args = (example_args,)
    importer = Importer(shares)
    notes: tuple[str, ...] = ()
    has_flex = False
    if isinstance(model, torch.export.ExportedProgram):
        if has_flex := bool(model.graph.find_nodes(op="call_function", target=FLEX)):
            model = copy.deepcopy(model)
            rewrite_flex_attention(model)
        source, forward = source_of(model), None
        program = model if owned and try_direct(model, importer.convert_map) else decompose(model)
        if program is not model:
            source = source_of(program)
    elif isinstance(model, torch.nn.Module):
        refuse_arrays(example_args, example_kwargs)
        args, kwargs = example_inputs(model, example_args, example_kwargs)
        notes = (transformers_cache.NOTE,) if transformers_cache.caching_configs(model, kwargs) else ()
        notes += (transformers_experts.NOTE,) if transformers_experts.looping_configs(model) else ()
        if not (example_args or example_kwargs):
            notes += (_carried(args, kwargs),)
        tokens = global_tokens(model, args, kwargs)
        notes += note(tokens)
        program = export_model(model, args, kwargs, tokens)
        has_flex = rewrite_flex_attention(program)
        source = source_of(program)
        if not try_direct(program, importer.convert_map):
            program = decompose(program)
            source = source_of(program)
        forward = model.forward
    else:
        raise InputError(f"a model is a torch.nn.Module or a torch.export.ExportedProgram, got {type(model).__name__}")
    _refuse_effects(program)
    make_constants_real(program)
    signature = read_signature(program, forward)
    if forward is None and (example_args or example_kwargs):
        _check_fits(signature, example_args, example_kwargs)
    for spec in signature.inputs:
        if 0 in spec.shape:
            raise UnsupportedError(f"input {spec.name!r} has no elements: its shape is {tuple(spec.shape)}")
    states = lift_states(program, kept)
    _drop_constants(program)
    mod = importer.from_exported_program(program, False, False, False, None)
    if weights := _weights(signature, (tuple(example_args or ()), dict(example_kwargs or {}))):
        mod["main"] = mod["main"].with_attr(WEIGHTS, weights)
    if states:
        mod = note_states(mod, program, len(signature.outputs), states)
    return ImportedModel(mod, signature, program, source, importer.site_nodes, notes, has_flex, states)


def _refuse_effects(program) -> None:
    """UnsupportedError for operators that PyTorch orders by tokens, since they print or check values at run time."""
    if any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs):
        ordered = (node for node in program.graph.nodes if getattr(node.target, "__name__", "") == "with_effects")
        names = sorted({str(node.args[1]) for node in ordered})
        raise UnsupportedError(f"the model has effects besides its results: {', '.join(names)}")


def refuse_meta(model) -> None:
    """InputError for weights that have shapes and no numbers."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise InputError(f"{name} is on the meta device, which holds no numbers: load the model's weights first")


def refuse_arrays(args, kwargs) -> None:
    """InputError for NumPy arrays among the example inputs."""
    for path, leaf in pytree.tree_flatten_with_path((tuple(args or ()), dict(kwargs or {})))[0]:
        if isinstance(leaf, np.ndarray):
            where = "".join(map(str, path[1:]))
            raise InputError(f"example input {where} is a NumPy array of shape {leaf.shape}: pass torch.from_numpy(it)")


def _carried(args, kwargs) -> str:
    """What the report says where the caller gave no example inputs."""
    shapes = [str(tuple(x.shape)) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return f"no example inputs were given: the model's own fix its shapes, {', '.join(shapes)}"


def _check_fits(signature: Signature, args, kwargs) -> None:
    """InputError for example inputs that do not fit an exported program."""
    try:
        signature.flatten(tuple(args or ()), dict(kwargs or {}))
    except InputError as error:
        raise InputError(
            f"the example inputs do not fit the exported program, whose own fix the shapes: {error}"
        ) from None


def _weights(signature: Signature, call) -> list[str]:
    """Names of the inputs for which the call gives parameters: they are a model's weights in every call."""
    given = pytree.tree_leaves(call)
    if len(given) != len(signature.in_leaves):
        return []  # the example call is not nested as the export
    leaves = [leaf.tensor for leaf, x in zip(signature.in_leaves, given) if isinstance(x, torch.nn.Parameter)]
    return [signature.inputs[number].name for number in leaves if number is not None]


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
    program.range_constraints.clear()  # they concern symbols that no shape has any more
