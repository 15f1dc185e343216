"""`pack`: an exported program of a padded batch, on the tokens of all its sequences in one row.

The given program takes (BATCH, TOKEN, …) tensors.  The new one takes (1, tokens, …) tensors of real tokens, one
sequence after another, and the lengths in the form of integer vectors; it computes for each sequence what the given
program computes for that sequence alone.  Each operator has a rule (table.py) by what it means: most compute each
token by itself; positions are counted inside each sequence; attention among tokens loses the model's mask, for the
engine's mask to keep sequences apart.  What mixes tokens in another way is an UnsupportedError.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from stof_tvm.frontend.importer import module_path
from stof_tvm.frontend.packing.batched import Batched
from stof_tvm.frontend.packing.dims import BATCH, TOKEN, dim_of
from stof_tvm.frontend.packing.elementwise import COPIES
from stof_tvm.frontend.packing.own_masks import OwnMasks
from stof_tvm.frontend.packing.rewriter import (
    ENDS,
    NUMBER,
    STARTS,
    WITHOUT_PADDING,
    Attention,
    Purpose,
    Rewriter,
    Value,
)
from stof_tvm.frontend.packing.table import check_masked, rule_of
from stof_tvm.frontend.packing.views import VIEW_RULES
from stof_tvm.frontend.pivots import may_be_attention
from stof_tvm.masks import Mask
from tir_kernels.errors import UnsupportedError

aten = torch.ops.aten
PIVOTS = {  # what names attentions in the importer
    *(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.exp.default),
}
OF_NUMBERS = {*VIEW_RULES, *COPIES, aten.index.Tensor, aten.add.Tensor} - {aten.cat.default}  # take batches' numbers
SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool
OF_TOKENS, OF_SEQUENCES, SHARED, FIXED = "tokens", "sequences", "shared", "fixed"


@dataclass(frozen=True)
class Output:
    """What a result is: `kind`, and where the batch and the tokens are in the given program's.

    OF_TOKENS: (…, 1, …, tokens, …), or the two in one dimension; OF_SEQUENCES: an entry for each sequence; SHARED: one
    for all of them; FIXED: without a batch.
    """

    kind: str
    batch: int = 0
    token: int = 0


@dataclass(frozen=True)
class PackedProgram:
    """A program for one row of tokens.

    Attributes
    ----------
    program : ExportedProgram
        Its positional arguments are the tensors of `inputs`; it returns a tuple of tensors.
    inputs : tuple of str
        Names of the given program's inputs, and of the vectors that lengths give (rewriter.py).
    outputs : tuple of Output
        Of the given program's tensors, in order.
    masks : dict
        The model's own mask at each attention, by its path.
    heads : dict
        The number of heads of each attention, by its path.
    depends_on_sequences : bool
        Whether the program takes or returns something for each of a number of sequences.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    masks: Mapping[str, Mask | None]
    heads: Mapping[str, int]
    depends_on_sequences: bool


def pack(
    batched: Batched, own: OwnMasks, tokens: int, sequences: int, purpose: Purpose = WITHOUT_PADDING
) -> PackedProgram:
    """The program for a row of `tokens` tokens of up to `sequences` sequences.

    Raises UnsupportedError, which names operator and module, for what cannot be computed on such a row.
    """
    program = batched.program
    values = [node.meta.get("val") for node in program.graph.nodes]
    device = next(x.device for x in values if isinstance(x, torch.Tensor))
    rewriter = Rewriter(batched.roles(), tokens, sequences, own, device, purpose)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    live = _live(program.graph)
    _placeholders(rewriter, batched, live)
    for node in program.graph.nodes:
        if node in live and node.op == "call_function":
            _rewrite(rewriter, node)
    output_node = program.graph.output_node()
    results = list(dict.fromkeys(x for x in output_node.args[0] if isinstance(x, Node)))
    outputs = [_output(rewriter, x) for x in results]
    rewriter.graph.output(tuple(rewriter.value(x).node for x in results))
    rewriter.graph.eliminate_dead_code()
    return _finished(rewriter, batched, specs, [rewriter.value(x).node for x in results], outputs)


def _live(graph) -> set[Node]:
    """The nodes that results depend on."""
    pending, live = [graph.output_node()], set()
    while pending:
        node = pending.pop()
        for operand in node.all_input_nodes:
            if operand not in live:
                live.add(operand)
                pending.append(operand)
    return live


def _placeholders(rewriter: Rewriter, batched: Batched, live: set[Node]) -> None:
    """Placeholders of the tensors that are read; the padding mask is of real tokens only."""
    inputs = batched.placeholders()
    for node in batched.program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node not in live or not isinstance(value, torch.Tensor):
            continue
        dims = tuple(dim_of(n, rewriter.roles) for n in value.shape)
        is_input = node.name in inputs
        is_sequence = is_input and not any(TOKEN in dim for dim in dims)
        new = rewriter.graph.placeholder(node.name)
        new.name = node.name  # that of an input which is called `input`, as a function of Python is, would be `input_1`
        shape = rewriter.shape(dims, is_sequence)
        with rewriter.mode:
            new.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
        rewriter.last_placeholder = new
        origins = frozenset({node.name}) if is_input else frozenset()
        rewriter.values[node] = Value(new, dims, is_sequence, origins)
    for node in live:
        if node.op == "placeholder" and node.name == batched.padding:
            value = rewriter.value(node)
            dtype = node.meta["val"].dtype
            shape = rewriter.shape(value.dims, False)
            new = rewriter.emit(node, aten.full.default, shape, batched.real, dtype=dtype, device=rewriter.device)
            fill = not batched.real if dtype == torch.bool else 1 - batched.real
            rewriter.values[node] = Value(new, value.dims, origins=value.origins, fill=fill)


def _rewrite(rewriter: Rewriter, node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, SYMBOLIC) or value is None:
        return  # a size, or an assertion
    if node.target is operator.getitem:
        rewriter.values[node] = rewriter.values[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    rewriter.current = node
    rule = rule_of(rewriter, node)
    operands = [x for x in map(rewriter.values.get, node.all_input_nodes) if isinstance(x, Value)]
    if any(x.coordinate == BATCH for x in operands) and node.target not in OF_NUMBERS:
        raise rewriter.refuse(node, "it computes with the number of a sequence in its batch")
    result = rule(rewriter, node)
    check_masked(rewriter, node, operands, result)
    rewriter.values[node] = result


def _output(rewriter: Rewriter, node: Node) -> Output:
    value = rewriter.value(node)
    batches = [axis for axis, dim in enumerate(value.dims) if BATCH in dim]
    tokens = value.tokens
    alone = all(dim in ((BATCH,), (TOKEN,), (BATCH, TOKEN)) for dim in value.dims if BATCH in dim or TOKEN in dim)
    if value.coordinate or value.is_pair or len(batches) > 1 or not alone or (tokens and not batches):
        raise UnsupportedError(
            f"output {node.name} has neither one entry for each token of a batch nor one for each sequence: it cannot "
            "be returned without padding; leave it out (output_attentions=False), or take without_padding=False"
        )
    if tokens:
        return Output(OF_TOKENS, batches[0], tokens[0])
    if batches:
        return Output(OF_SEQUENCES if value.is_sequence else SHARED, batches[0])
    return Output(FIXED)


def _finished(rewriter: Rewriter, batched: Batched, specs, results: list[Node], outputs) -> PackedProgram:
    """The new graph as an exported program with positional arguments."""
    graph, given = rewriter.graph, batched.program
    users = batched.placeholders()
    input_specs, names = [], []
    for node in list(graph.find_nodes(op="placeholder")):
        spec = specs.get(node.name)
        is_user = node.name in users or spec is None
        if not node.users and not any(node is x for x in results):
            graph.erase_node(node)
        elif is_user:
            names.append(node.name)
            input_specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None))
        else:
            input_specs.append(spec)
    output_specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=x.name), None) for x in results]
    graph.lint()
    module = GraphModule(torch.nn.Module(), graph)
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((tuple(range(len(names))), {})),
        out_spec=pytree.tree_structure(tuple(range(len(results)))),
        forward_arg_names=names,
    )
    kept = {spec.target for spec in input_specs if spec.target is not None}
    program = torch.export.ExportedProgram(
        module,
        graph,
        ExportGraphSignature(input_specs, output_specs),
        {name: x for name, x in given.state_dict.items() if name in kept},
        {},
        [ModuleCallEntry("", signature)],
        constants={name: x for name, x in given.constants.items() if name in kept},
        verifiers=given.verifiers,
    )
    found = _paths(rewriter)
    own_rows = any(
        rewriter.values[x].is_sequence for name, x in users.items() if name in names and x in rewriter.values
    )
    return PackedProgram(
        program,
        tuple(names),
        tuple(outputs),
        {path: attention.mask for path, attention in found.items()},
        {path: _heads(attention.node) for path, attention in found.items()},
        own_rows or bool({NUMBER, STARTS, ENDS} & {*names}),
    )


def _paths(rewriter: Rewriter) -> dict[str, Attention]:
    """The attentions by the names that the importer gives these (Context.site)."""
    attentions = {attention.node: attention for attention in rewriter.attentions}
    counts: dict[str, int] = {}
    found: dict[str, Attention] = {}
    for node in rewriter.graph.nodes:
        if node in attentions or _may_be_site(node):
            path = module_path(node)
            count = counts[path] = counts.get(path, -1) + 1
            if node in attentions:
                found[f"{path}#{count}" if count else path] = attentions[node]
    return found


def _heads(node: Node) -> int:
    """The number of heads of an attention."""
    shape = node.meta["val"].shape
    return int(shape[-3]) if len(shape) > 3 else 1


def _may_be_site(node: Node) -> bool:
    """Whether the importer numbers a node among the attentions of its module."""
    if node.target is aten.scaled_dot_product_attention.default:
        return True
    return node.op == "call_function" and node.target in PIVOTS and may_be_attention(node)
