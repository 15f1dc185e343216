"""`pad`: an exported program of symbolic sizes at the sizes of a bucket, which computes what it does at smaller ones.

The program gets inputs of the bucket's sizes and the numbers of the real ones.  What is beyond these in an input is
padding, and may be anything.  Each operator has a rule (rules/), by what it means, that says where the padding of its
result is, and changes the graph where padding would reach anything else: a sum gets zeros for it, a softmax -inf, a
mean the real number of elements.  So each value's places that are no padding hold what the program computes at the
smaller sizes.  What has no rule is an UnsupportedError.
"""

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from stof_tvm.frontend.padding.dims import (
    Dim,
    Number,
    Size,
    at,
    dim_of,
    grows,
    is_padded,
    length,
    number_of,
    same_size,
    size_of,
)
from stof_tvm.frontend.padding.rewriter import INTEGERS, LAZY, REALS, Rewriter, Value
from stof_tvm.frontend.padding.rules.table import rule_of
from stof_tvm.frontend.specialise import NUMBERS, specialised
from tir_kernels.errors import StofError, UnsupportedError

aten = torch.ops.aten
RETURNED = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)


@dataclass(frozen=True)
class PaddedProgram:
    """A program at the sizes of a bucket.

    Attributes
    ----------
    program : ExportedProgram or None
        Its keyword arguments end with `numbers`; None once its engine is built.
    integers, reals : tuple of expressions
        What the int64 vector `stof_integers` and the float64 vector `stof_reals` hold, of a call's sizes.  There is no
        such input where it would be empty.
    outputs : tuple
        For each result: the dimensions of a tensor, a Number of the sizes, or a constant.
    """

    program: Any  # an ExportedProgram until its engine is built
    integers: tuple[Size, ...]
    reals: tuple[Size, ...]
    outputs: tuple[tuple[Dim, ...] | Number | Any, ...]

    def numbers(self, sizes: Mapping) -> dict[str, torch.Tensor]:
        """The inputs besides the model's, for a call with a number for each symbol."""
        found = {}
        if self.integers:
            found[INTEGERS] = torch.tensor([at(size, sizes) for size in self.integers], dtype=torch.int64)
        if self.reals:
            found[REALS] = torch.tensor([float(x.subs(sizes)) for x in self.reals], dtype=torch.float64)
        return found


def pad(
    program: torch.export.ExportedProgram, sizes: Mapping, least: Mapping, has_masks: bool = False
) -> PaddedProgram:
    """The program at a bucket's sizes.

    Parameters
    ----------
    program : ExportedProgram
        In functional form, of symbolic sizes; not changed.
    sizes, least : mapping
        Of each symbol, the bucket's number, and the least one of a call.
    has_masks : bool
        Whether attentions get masks from outside, whose rows and columns are counted along the tensors' dimensions.

    Raises UnsupportedError for an operator without a rule, and where its rule finds padding that would reach a result.
    """
    fixed = specialised(program, sizes)
    specs = fixed.graph_signature
    for spec in specs.output_specs:
        if spec.kind not in RETURNED:
            raise UnsupportedError(
                f"the model updates {spec.target!r}, a state, which one range of shapes cannot; {LAZY}"
            )
    stored = {**fixed.state_dict, **fixed.constants}
    tensors = {s.arg.name: stored[s.target] for s in specs.input_specs if s.kind is not InputKind.USER_INPUT}
    twins = {node.name: node for node in program.graph.nodes}
    nodes = list(fixed.graph.nodes)
    rewriter = Rewriter(fixed.graph, twins, sizes, least, tensors, has_masks)
    for node in nodes:
        _rewrite(rewriter, node)
    outputs = _outputs(rewriter, program, fixed)
    return PaddedProgram(_with_inputs(rewriter, fixed), tuple(rewriter.integers), tuple(rewriter.reals), outputs)


def _rewrite(rewriter: Rewriter, node: torch.fx.Node) -> None:
    twin = rewriter.twins[node.name]
    value = twin.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.Tensor):
        rewriter.values[node] = Value(tuple(dim_of(n) for n in value.shape))
    elif node in rewriter.replaced:
        rewriter.replace(node, *rewriter.replaced[node])
    elif node.op == "call_function" and node.target is operator.getitem:
        rewriter.values[node] = rewriter.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if rewriter.values[node] is None:
            raise rewriter.refuse(node.args[0], f"its result {node.args[1]} depends on padding")  # type: ignore[arg-type]
    elif node.op == "call_function" and value is not None:
        results = list(value) if isinstance(value, tuple | list) else [value]
        operands = [rewriter.values[x] for x in node.all_input_nodes if x in rewriter.values]
        touched = [x for x in operands if not isinstance(x, Value) or x.padded]
        is_symbolic = any(is_padded(dim_of(n)) for x in results for n in x.shape)
        if not touched and not is_symbolic and not rewriter.has_symbols(node):
            plain = [Value(tuple(dim_of(n) for n in x.shape)) for x in results]
            rewriter.values[node] = plain if isinstance(value, tuple | list) else plain[0]
            return
        found = _by_rule(rewriter, node)
        rewriter.values[node] = found
        for known, result in zip(found if isinstance(found, list) else [found], results, strict=True):
            _check(rewriter, node, known, result)
        return
    if node in rewriter.values and isinstance(value, torch.Tensor):
        _check(rewriter, node, rewriter.values[node], value)


def _by_rule(rewriter: Rewriter, node: torch.fx.Node):
    """What a node's rule says of its results; what it did not foresee is refused."""
    rule = rule_of(rewriter, node)
    try:
        return rule(rewriter, node)
    except StofError:
        raise
    except Exception as error:
        raise rewriter.refuse(node, f"its rule failed ({type(error).__name__}: {error})") from error


def _check(rewriter: Rewriter, node, known: Value | None, result: torch.Tensor) -> None:
    """UnsupportedError where what is known of a result does not have its sizes."""
    if known is None:
        return
    for dim, size in zip(known.dims, result.shape, strict=True):
        if not same_size(length(dim), size_of(size)):
            raise rewriter.refuse(node, f"its size {size} was not followed")
        if not all(grows(factor, rewriter.least) for factor in dim):
            raise rewriter.refuse(node, f"its size {size} is not known to grow with the sizes of the inputs")


def _outputs(rewriter: Rewriter, program, fixed) -> tuple:
    """What each output is."""
    found: list = []
    specs, results = program.graph_signature.output_specs, fixed.graph.output_node().args[0]
    for spec, result in zip(specs, results, strict=True):
        if isinstance(spec.arg, TensorArgument):
            found.append(rewriter.value(result).dims)
        elif isinstance(spec.arg, NUMBERS):
            found.append(number_of(rewriter.twins[spec.arg.name].meta["val"]))
        else:
            found.append(result)  # a constant
    return tuple(found)


def _with_inputs(rewriter: Rewriter, fixed) -> torch.export.ExportedProgram:
    """The rewritten program, its new inputs the last of its keyword arguments."""
    graph, specs = fixed.graph, fixed.graph_signature
    outputs = [
        type(spec)(spec.kind, TensorArgument(name=result.name), spec.target)
        if isinstance(spec.arg, TensorArgument)
        else spec
        for spec, result in zip(specs.output_specs, graph.output_node().args[0], strict=True)
    ]
    inputs = [*specs.input_specs]
    args, kwargs = fixed.call_spec.in_spec.unflatten(range(fixed.call_spec.in_spec.num_leaves))
    entry = fixed.module_call_graph[0]
    names = [*entry.signature.forward_arg_names]
    for name, numbers, dtype in (
        (INTEGERS, rewriter.integers, torch.int64),
        (REALS, rewriter.reals, torch.float64),
    ):
        node = rewriter.inputs[name]
        if not numbers:
            graph.erase_node(node)
            continue
        with rewriter.mode:
            node.meta["val"] = torch.empty(len(numbers), dtype=dtype, device=rewriter.device)
        inputs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None))
        kwargs[name] = 0
        names.append(name)
    signature = dataclasses.replace(
        entry.signature, in_spec=pytree.tree_structure((args, kwargs)), forward_arg_names=names
    )
    graph.eliminate_dead_code()
    graph.lint()
    fixed.graph_module.recompile()
    return torch.export.ExportedProgram(
        fixed.graph_module,
        graph,
        ExportGraphSignature(inputs, outputs),
        fixed.state_dict,
        {},
        [dataclasses.replace(entry, signature=signature), *fixed.module_call_graph[1:]],
        constants=fixed.constants,
        verifiers=fixed.verifiers,
    )
