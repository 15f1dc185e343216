"""A model exported for any batch and length, with what tells real tokens from padding."""

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import Node
from torch.fx.experimental import _config as symbolic
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Min

from stof_tvm.frontend.export import decompose, export_model
from stof_tvm.frontend.packing.dims import BATCH, TOKEN
from stof_tvm.frontend.packing.own_masks import OwnMasks
from stof_tvm.frontend.shape_range import ShapeRange, range_of_program
from stof_tvm.signature import Signature, read_signature
from tir_kernels.errors import ExportError, InputError, UnsupportedError

MASK_OF_REAL = ("attention_mask",)  # names of inputs that are 1 or True at real tokens
MASK_OF_PADDING = ("src_key_padding_mask", "key_padding_mask")  # True at padding


@dataclass(frozen=True)
class Batched:
    """An exported program whose batch and length are symbols, in functional form.

    Attributes
    ----------
    program : ExportedProgram
    padding : str
        The name of the input that tells real tokens from padding, "" if there is none.
    real : bool or number
        What that is at a real token.
    longest : int
        The largest length of a sequence.
    traced : int
        The length that it was exported with.
    signature : Signature
        Of the model's calls.
    """

    program: torch.export.ExportedProgram
    padding: str
    real: Any
    longest: int
    traced: int
    signature: Signature

    def __post_init__(self):
        for spec in self.program.graph_signature.output_specs:
            if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
                raise UnsupportedError(
                    f"the model updates {spec.target!r}, a state, which batches without padding cannot have"
                )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and constants by the names of their placeholders."""
        stored = {**self.program.state_dict, **self.program.constants}
        specs = self.program.graph_signature.input_specs
        return {s.arg.name: stored[s.target] for s in specs if s.kind is not InputKind.USER_INPUT}

    def placeholders(self) -> dict[str, Node]:
        """The nodes of the caller's tensors by name."""
        specs = self.program.graph_signature.input_specs
        names = {s.arg.name for s in specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)}
        return {x.name: x for x in self.program.graph.find_nodes(op="placeholder") if x.name in names}

    def roles(self) -> dict[str, str]:
        """BATCH or TOKEN by the names of the symbols: the first dimension of an input is its batch, the second one
        its tokens.  UnsupportedError where they are not dynamic."""
        roles: dict[str, str] = {}
        for name, node in self.placeholders().items():
            for size, role in zip(node.meta["val"].shape, (BATCH, TOKEN)):
                symbol = self._symbol(size)
                if role == TOKEN and symbol is None and size != self.traced:
                    continue  # an input of each sequence
                if symbol is None or roles.setdefault(symbol, role) != role:
                    raise UnsupportedError(
                        f"the model fixes dimension {(BATCH, TOKEN).index(role)} of {name} to {size}, and a "
                        "program for rows of tokens is made from one for all batches and lengths"
                    )
        if TOKEN not in roles.values():
            raise UnsupportedError("no input of the model has a batch and tokens in its first two dimensions")
        for node in self.program.graph.nodes:
            for size in getattr(node.meta.get("val"), "shape", ()):
                for least in size.node.expr.atoms(Min) if isinstance(size, torch.SymInt) else ():
                    if (symbol := self._of_table(least)) in roles:
                        roles[str(least)] = roles[str(symbol)]
        return roles

    def _symbol(self, size) -> str | None:
        """The name of the symbol that a size is, None for another size."""
        if not isinstance(size, torch.SymInt):
            return None
        expression = size.node.expr
        return str(expression) if expression.is_Symbol else self._of_table(expression)

    def _of_table(self, least) -> str | None:
        """The symbol of min(symbol, a table's length), which it always is: no sequence is longer than the longest."""
        symbols = [x for x in least.args if not x.is_number] if isinstance(least, Min) else []
        is_long = all(x >= self.longest for x in least.args if x.is_number)
        return str(symbols[0]) if len(symbols) == 1 and symbols[0].is_Symbol and is_long else None

    def own_masks(self) -> OwnMasks:
        """What the model's masks are for a sequence of the longest length."""
        roles = self.roles()
        inputs = {}
        for name, node in self.placeholders().items():
            shape = [_of_one(n, roles, self.longest) for n in node.meta["val"].shape]
            inputs[name] = torch.zeros(shape, dtype=node.meta["val"].dtype, device=node.meta["val"].device)
        first = next(name for name, x in self.placeholders().items() if x.meta["val"].dim() > 1)
        ordered = {first: inputs[first], **inputs}
        return OwnMasks(self.tensors, ordered, self.padding, self.real)


def _of_one(size, roles: Mapping[str, str], length: int) -> int:
    return 1 if roles.get(str(size)) == BATCH else length if roles.get(str(size)) == TOKEN else int(size)


def batched_of_module(
    model: torch.nn.Module, args: tuple, kwargs: dict, padding: str | None, all_lengths: bool = True
) -> Batched:
    """A model exported with batch and length as symbols, from one example call; sequences may be as long as its.

    Without `all_lengths` they are that long.  `padding` is the name of the input that tells real tokens from padding;
    None looks for one of MASK_OF_REAL and MASK_OF_PADDING.  Raises InputError for inputs without batch and tokens,
    ExportError as torch.export does.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    found = [name for name in (*MASK_OF_REAL, *MASK_OF_PADDING) if isinstance(bound.get(name), torch.Tensor)]
    if padding is None:
        padding = found[0] if found else ""
    elif not isinstance(bound.get(padding), torch.Tensor):
        raise InputError(f"without_padding={padding!r} names no tensor among the example inputs, {', '.join(bound)}")
    option = "without_padding" if all_lengths else "context_parallel"
    batch, length = _sizes(bound, padding, option)
    # A batch of 1 would be a number for torch.export, and so might be a length that is a table's.
    many, some = 2 if batch < 2 else batch, max(2, length // 2)
    many = 3 if many == some else many

    def example(x):
        if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] != batch:
            return x
        x = x.index_select(0, torch.arange(many, device=x.device) % batch)
        return x[:, :some].clone() if x.dim() > 1 and x.shape[1] == length else x

    def dynamic(x):
        if not isinstance(x, torch.Tensor):
            return None
        if x.dim() == 0 or x.shape[0] != many:
            return {}
        return {0: Dim.AUTO, **({1: Dim.AUTO} if x.dim() > 1 and x.shape[1] == some else {})}

    args, kwargs = pytree.tree_map(example, (args, kwargs))
    spec = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    spec = {name: pytree.tree_map(dynamic, x) for name, x in spec.items()}
    real: Any = 1
    if padding:
        is_padding = padding in MASK_OF_PADDING
        real = (not is_padding) if bound[padding].dtype == torch.bool else int(not is_padding)

    def batched() -> Batched:
        exported = export_model(model, args, kwargs, None, spec)
        shapes, program = range_of_program(exported), decompose(exported, is_dynamic=True)
        found = Batched(program, padding, real, length, some, read_signature(program, model.forward))
        _check_lengths(found, shapes, many, 2 if all_lengths else length)
        return found

    try:
        return batched()
    except UnsupportedError as error:
        # A length that is a table's is a case of its own for torch.export, unless it is told to ask less.
        with symbolic.patch(backed_size_oblivious=True), contextlib.suppress(UnsupportedError, ExportError):  # type: ignore[attr-defined]  # made when it is imported
            return batched()
        raise error
    except ExportError as error:
        raise ExportError(
            f"{error}\n{option} takes an input's first dimension as the batch and the second, {length} here, as tokens"
        ) from error


def _check_lengths(batched: Batched, shapes: ShapeRange, batch: int, shortest: int) -> None:
    """UnsupportedError where the program that was exported is not the model's at some length."""
    roles, nodes = batched.roles(), batched.placeholders()
    examples = [nodes[spec.name].meta["val"] for spec in shapes.signature.inputs]
    for length in range(shortest, batched.longest + 1):
        sizes = {BATCH: batch, TOKEN: length}
        values = [
            torch.empty(1, dtype=x.dtype).expand([sizes.get(roles.get(str(n), ""), n) for n in x.shape])
            for x in examples
        ]
        try:
            shapes.numbers(values)
        except InputError as error:
            raise UnsupportedError(
                f"the model does not compute sequences of {length} tokens as it does others, which a "
                f"program for rows of tokens does: {error}"
            ) from None


def _sizes(bound: Mapping, padding: str, argument: str) -> tuple[int, int]:
    """(batch, length) of an example call; an InputError names the argument of `build` that asks for them."""
    tensors = [x for x in pytree.tree_leaves(bound) if isinstance(x, torch.Tensor) and x.dim() > 1]
    first = bound[padding] if padding else tensors[0] if tensors else None
    if first is None or first.dim() < 2 or (padding and first.dim() != 2):
        name = padding or "the first input"
        raise InputError(f"{argument} needs {name} to be of shape (batch, length{'' if padding else ', …'})")
    batch, length = first.shape[:2]
    if batch < 1 or length < 2:
        shape = tuple(first.shape)
        raise InputError(f"{argument} needs an example of one sequence or more, of two tokens or more; got {shape}")
    return batch, length
