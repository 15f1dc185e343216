"""What rules write: a program on the tokens of all sequences in one row, and what is known of each value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from stof_tvm.frontend.importer import module_path, operator_name
from stof_tvm.frontend.packing.dims import BATCH, TOKEN, Dim, UnknownSize, size_factors, words
from stof_tvm.frontend.packing.own_masks import OwnMasks
from stof_tvm.masks import Mask
from tir_kernels.errors import UnsupportedError

aten = torch.ops.aten
KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
WEIGHTS = "weights"  # a softmax over the tokens of a sequence
PLACE, NUMBER, FIRST, STARTS, ENDS = "stof_place", "stof_number", "stof_first", "stof_starts", "stof_ends"
PER_SEQUENCE = (STARTS, ENDS)


@dataclass(frozen=True)
class Purpose:
    """What a row of tokens is for.

    Attributes
    ----------
    vectors : tuple of str
        The vectors that its program may take.
    cannot, instead : str
        Of an operator that has no rule: what cannot be done with it, and what can be done instead.
    """

    vectors: tuple[str, ...]
    cannot: str
    instead: str


WITHOUT_PADDING = Purpose(
    (PLACE, NUMBER, FIRST, STARTS, ENDS),
    "cannot be computed without padding",
    "without_padding=False computes the padded batch",
)


@dataclass(frozen=True)
class Value:
    """A value of the given program, and the node that has it in the new one.

    Attributes
    ----------
    node : Node
        In the new graph.  There the tokens of all sequences are one dimension, TOKEN, and BATCH has size 1; of a value
        without tokens it has an entry for each sequence if `is_sequence`, else all sequences share the value.
    dims : tuple of Dim
    is_sequence : bool
    origins : frozenset of str
        The inputs that it depends on, besides shapes.
    role : str
        WEIGHTS or "".
    coordinate : str
        TOKEN or BATCH: each element is its own position along the one dimension of that factor.
    keeps : tuple of Mask
        The model's masks that were taken off these scores.
    fill : number, optional
        What it is at each token of padding in the given program, where that is known.
    constant : number, optional
        What it is everywhere, of tensors made of one number and their copies.
    """

    node: Node
    dims: tuple[Dim, ...]
    is_sequence: bool = False
    origins: frozenset[str] = frozenset()
    role: str = ""
    coordinate: str = ""
    keeps: tuple[Mask, ...] = ()
    fill: Any = None
    constant: Any = None

    @property
    def tokens(self) -> list[int]:
        """The dimensions that tokens are in."""
        return [axis for axis, dim in enumerate(self.dims) if TOKEN in dim]

    @property
    def is_pair(self) -> bool:
        """Whether it has an element for each pair of tokens."""
        return sum(dim.count(TOKEN) for dim in self.dims) > 1

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same whatever the call is."""
        return not self.origins and not self.is_sequence and not any(TOKEN in dim or BATCH in dim for dim in self.dims)


@dataclass(frozen=True)
class Attention:
    """An attention among the tokens of a sequence: its node in the new graph, and the model's own mask of positions."""

    node: Node
    mask: Mask | None


class Rewriter:
    """The new graph, and the values of the given program in it.

    Parameters
    ----------
    roles : dict
        BATCH or TOKEN by the names of symbols.
    tokens, sequences : int
        How many tokens and sequences the new program takes.
    own : OwnMasks
        What the model's masks are.
    purpose : Purpose
    """

    def __init__(
        self,
        roles: Mapping[str, str],
        tokens: int,
        sequences: int,
        own: OwnMasks,
        device: torch.device,
        purpose: Purpose = WITHOUT_PADDING,
    ):
        self.purpose = purpose
        self.current: Node | None = None  # the node of the given program that is being rewritten
        self.roles, self.tokens, self.sequences, self.own, self.device = roles, tokens, sequences, own, device
        self.graph, self.mode = Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[Node, Any] = {}  # of the given program's nodes
        self.attentions: list[Attention] = []
        self.inputs: dict[str, Node] = {}  # that the batch's lengths give, by name
        self.last_placeholder: Node | None = None

    # -- what is known ------------------------------------------------------------------------------------------------

    def refuse(self, node: Node, why: str) -> UnsupportedError:
        """The error for a node that cannot be computed on a row of tokens."""
        where = module_path(node) or "the root module"
        return UnsupportedError(
            f"{operator_name(node)} in {where} {self.purpose.cannot}: {why}; {self.purpose.instead}"
        )

    def value(self, node: Node) -> Value:
        """What is known of a tensor."""
        return self.values[node]

    def given(self, node: Node) -> dict[str, Any]:
        """A node's arguments by the names of its schema, defaults included."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]  # an operator
        given = {x.name: x.default_value for x in schema if x.has_default_value()}
        return {**given, **dict(zip((x.name for x in schema), node.args)), **node.kwargs}

    def has_sizes(self, node: Node) -> bool:
        """Whether an argument is a size of the batch."""
        return any(isinstance(x.meta.get("val"), torch.SymInt | torch.SymFloat) for x in node.all_input_nodes)

    def sizes(self, node: Node, of=None) -> list:
        """The sizes of a node's result, or of the tensor `of`, in factors."""
        try:
            return [size_factors(n, self.roles) for n in (node.meta["val"] if of is None else of).shape]
        except UnknownSize as error:
            raise self.refuse(node, f"its size {error} is no product of the batch and the length") from None

    def simple_dims(self, node: Node) -> list[Dim]:
        """The dimensions of a node's result, where each has one factor."""
        found = []
        for number, symbols in self.sizes(node):
            factors = [*symbols.elements(), *([number] if number != 1 else [])]
            if len(factors) > 1:
                raise self.refuse(node, "a new dimension joins the batch with others")
            found.append(tuple(factors))
        return found

    def size(self, dim: Dim, is_sequence: bool) -> int:
        """The size of a dimension in the new program."""
        total = 1
        for factor in dim:
            total *= (
                self.tokens if factor == TOKEN else factor if factor != BATCH else self.sequences if is_sequence else 1
            )
        return total

    def shape(self, dims: Sequence[Dim], is_sequence: bool) -> list[int]:
        """The sizes of dimensions in the new program."""
        return [self.size(dim, is_sequence) for dim in dims]

    def origins(self, node: Node) -> frozenset[str]:
        """The inputs that a node's operands depend on."""
        values = [x for operand in node.all_input_nodes for x in _flat(self.values.get(operand))]
        return frozenset().union(*(x.origins for x in values))

    # -- what is written ----------------------------------------------------------------------------------------------

    def emit(self, origin: Node, target, *args, **kwargs) -> Node:
        """A new operator's node, in the module of `origin`."""
        node = self.graph.call_function(target, args, kwargs)
        operands = map_arg((args, kwargs), lambda x: x.meta["val"])
        try:
            with self.mode:
                node.meta["val"] = target(*operands[0], **operands[1])
        except Exception as error:  # PyTorch's, for shapes that do not fit
            raise self.refuse(origin, f"on a row of tokens PyTorch says {error}") from error
        node.meta.update({key: origin.meta[key] for key in KEPT if key in origin.meta})
        return node

    def same(self, node: Node, **changed) -> Node:
        """The node's own operator on the new operands; `changed` are other arguments, by name."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        names = [x.name for x in schema]
        args = [changed.get(name, x) for name, x in zip(names, node.args)]
        kwargs = {**node.kwargs, **{name: x for name, x in changed.items() if names.index(name) >= len(node.args)}}
        positional, named = map_arg((tuple(args), kwargs), lambda x: self._new(node, x))
        return self.emit(node, node.target, *positional, **named)

    def _new(self, node: Node, operand: Node):
        if operand.graph is self.graph:
            return operand
        if isinstance(operand.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            raise self.refuse(node, "it computes with the length of the batch")
        return self.value(operand).node

    def input(self, name: str) -> Node:
        """One of the inputs that the lengths of the sequences give, int64."""
        if name not in self.purpose.vectors:
            assert self.current is not None
            raise self.refuse(self.current, "it asks for a whole sequence")
        if name not in self.inputs:
            with self.graph.inserting_after(self.last_placeholder):
                self.inputs[name] = self.last_placeholder = self.graph.placeholder(name)
            size = self.sequences if name in PER_SEQUENCE else self.tokens
            with self.mode:
                self.inputs[name].meta["val"] = torch.empty(size, dtype=torch.int64, device=self.device)
        return self.inputs[name]

    def result(self, origin: Node, node: Node, dims: Sequence[Dim], **known) -> Value:
        """The Value of a new node; its sizes must be those of the given program's result."""
        value = Value(node, tuple(dims), **{"origins": self.origins(origin), **known})
        self.check(origin, value)
        return value

    def check(self, origin: Node, value: Value, of=None) -> None:
        """An error unless a value has the sizes of a node's result, before and after."""
        for dim, (number, symbols) in zip(value.dims, self.sizes(origin, of), strict=True):
            ints = [factor for factor in dim if isinstance(factor, int)]
            same = all(dim.count(factor) == symbols[factor] for factor in (BATCH, TOKEN))
            if not same or (ints[0] if ints else 1) != number or len(ints) > 1:
                raise self.refuse(origin, f"a dimension of its result was taken for {words(dim)}")
        if list(value.node.meta["val"].shape) != self.shape(value.dims, value.is_sequence):
            raise self.refuse(origin, "its result on a row of tokens has another shape")

    def per_token(self, origin: Node, value: Value, rank: int, token_axis: int) -> Value:
        """A value of each sequence, spread to the sequence's tokens along a dimension of size 1."""
        value = self.of_rank(origin, value, rank)
        (axis,) = [n for n, dim in enumerate(value.dims) if BATCH in dim]
        if value.dims[axis] != (BATCH,) or value.dims[token_axis] != ():
            raise self.refuse(origin, "it joins values of sequences with values of tokens")
        node = self.emit(origin, aten.index_select.default, value.node, axis, self.input(NUMBER))
        order = list(range(rank))
        order[axis], order[token_axis] = token_axis, axis
        node = self.emit(origin, aten.permute.default, node, order)
        dims = list(value.dims)
        dims[token_axis] = (TOKEN,)
        return replace(value, node=node, dims=tuple(dims), is_sequence=False, coordinate="")

    def of_rank(self, origin: Node, value: Value, rank: int) -> Value:
        """A value with leading dimensions of size 1."""
        node, dims = value.node, value.dims
        while len(dims) < rank:
            node, dims = self.emit(origin, aten.unsqueeze.default, node, 0), ((), *dims)
        return replace(value, node=node, dims=dims)

    def of_sequences(self, origin: Node, value: Value) -> Value:
        """A value that all sequences share, with an entry for each sequence."""
        if value.is_sequence or not any(BATCH in dim for dim in value.dims):
            return value
        node = self.emit(origin, aten.expand.default, value.node, self.shape(value.dims, True))
        return replace(value, node=node, is_sequence=True)


def arguments(node: Node) -> Any:
    """A node's positional arguments, as its operator takes them."""
    return node.args


def _flat(value) -> list[Value]:
    found = value if isinstance(value, list) else [value]
    return [x for x in found if isinstance(x, Value)]
