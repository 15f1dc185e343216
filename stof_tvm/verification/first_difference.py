"""Where an engine first differs from PyTorch: the module whose output differs, while those before it agree.

The program is compiled again to return outputs of modules, some at a time, between the last that agrees and the first
that does not.  A value that is returned is not fused away.  So this is not the same engine, and a difference that comes
from computing modules together may be gone.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from stof_tvm.frontend.import_model import ImportedModel
from stof_tvm.frontend.importer import Importer, module_path
from stof_tvm.frontend.states import note_states
from stof_tvm.signature import Leaf, TensorSpec
from stof_tvm.verification.comparison import judge
from stof_tvm.verification.reference import Reference

AT_ONCE = 16  # outputs compared at a time: all are held in memory


def first_difference(
    imported: ImportedModel,
    reference: Reference,
    compiled: Callable,
    call: tuple,
    dtype: torch.dtype | None,
    precision: torch.dtype | None = None,
) -> str:
    """A sentence that names the first module whose output differs.

    `compiled` makes an engine of an ImportedModel; `reference` has the masks; errors are measured in `dtype`
    and judged by the roundings of `precision`, as `judge` does.
    `call` is (args, kwargs).
    """
    args, kwargs = call
    boundaries = [(path, name) for path, name in module_outputs(imported) if name in reference.names]
    known_good, known_bad = -1, len(boundaries)
    while between := range(known_good + 1, known_bad):
        chosen = list(between[:: -(-len(between) // AT_ONCE)])
        names = [boundaries[n][1] for n in chosen]
        engine = compiled(with_outputs(imported, names))
        ours = engine(*on(engine.device_type, args), **on(engine.device_type, kwargs))
        theirs, wider = (reference.values(args, kwargs, names, x) for x in (None, dtype))
        wrong = [n for n, x, y, z in zip(chosen, ours, theirs, wider) if not _is_right(x, y, z, precision)]
        known_bad = wrong[0] if wrong else known_bad
        known_good = max((n for n in chosen if n < known_bad), default=known_good)
    if known_bad == len(boundaries):
        return "No module differs when its output is read: modules that are computed together do"
    path = boundaries[known_bad][0]
    return f"The first module whose output differs is {path or '(the model)'}"


def module_outputs(imported: ImportedModel) -> list[tuple[str, str]]:
    """(path, name of the node) of each tensor that a module computes and something outside of it reads.

    They are in the order of computation; `path` is that of the innermost module.
    """
    nodes = list(imported.program.graph.nodes)
    found = []
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        path = module_path(node)
        if any(user.op == "output" or not _is_within(module_path(user), path) for user in node.users):
            found.append((path, node.name))
    return found


def with_outputs(imported: ImportedModel, names: list[str]) -> ImportedModel:
    """The model, changed to return a list of the values of some nodes, and to leave its states as they are."""
    program = imported.program
    specs = program.graph_signature.output_specs
    output, nodes = program.graph.output_node(), {node.name: node for node in program.graph.nodes}
    given = output.args, list(specs)
    states = tuple(replace(state, new=state.node) for state in imported.states)
    returned = [*names, *(state.node for state in states)]
    try:
        output.args = (tuple(nodes[name] for name in returned),)
        specs[:] = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=name), None) for name in returned]
        mod = Importer().from_exported_program(program, False, False, False, None)
        if states:
            mod = note_states(mod, program, len(names), states)
    finally:
        output.args, specs[:] = given
    values = [nodes[name].meta["val"] for name in names]
    outputs = tuple(TensorSpec(n, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in zip(names, values))
    leaves = tuple(Leaf(name, number) for number, name in enumerate(names))
    nesting = pytree.tree_structure([0] * len(names))
    signature = replace(imported.signature, outputs=outputs, out_leaves=leaves, out_spec=nesting)
    return replace(imported, mod=mod, signature=signature, states=states)


def on(device: str, inputs):
    """The inputs with their tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)


def _is_within(path: str, owner: str) -> bool:
    return path == owner or path.startswith(owner + ".") or not owner


def _is_right(actual, expected, wider, precision) -> bool:
    return judge(actual.to(expected.device), expected, lambda: wider, lambda: None, precision=precision).is_right
