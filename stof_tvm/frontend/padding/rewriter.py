"""What rules write: the graph of a program at a bucket's sizes, with numbers that are inputs of each call."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from stof_tvm.frontend.importer import module_path, operator_name
from stof_tvm.frontend.padding.dims import Dim, Size, at, dim_of, is_padded, length, size_of
from stof_tvm.frontend.specialise import SYMBOLIC
from tir_kernels.errors import UnsupportedError

aten = torch.ops.aten
INTEGERS, REALS = "stof_integers", "stof_reals"  # names of inputs
KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
LAZY = "lazy=True compiles each shape instead"


@dataclass(frozen=True)
class Real:
    """A real number that depends on sizes, such as the root of one."""

    of: Any


class OfRow(float):
    """What a softmax has in the padding of a row; in that of a row of NaN, it is NaN as well.

    No sum notices the difference, since such a row's sum is NaN, but what a place holds by itself may.
    """


@dataclass(frozen=True)
class Value:
    """What is known of a tensor: its dimensions, and what is in the padding of some.

    `fills` maps a dimension's number to the one value in its padding, where the other coordinates are no padding.
    """

    dims: tuple[Dim, ...]
    fills: Mapping[int, float] = field(default_factory=dict)

    @property
    def padded(self) -> list[int]:
        """Numbers of the dimensions that have padding."""
        return [number for number, dim in enumerate(self.dims) if is_padded(dim)]


class Rewriter:
    """A graph at the sizes of a bucket, and what is known of its values.

    Parameters
    ----------
    graph : torch.fx.Graph
        At fixed sizes; changed by the rules.
    twins : dict
        The nodes of the program with symbolic sizes, by their names.
    sizes, least : mapping
        The bucket's number for each symbol, and the least one of a call.
    tensors : mapping
        Parameters, buffers and constants by the names of their placeholders.
    has_masks : bool
        Whether masks are given from outside, whose rows and columns are counted along an attention's dimensions.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        twins: Mapping[str, Node],
        sizes: Mapping,
        least: Mapping,
        tensors: Mapping,
        has_masks: bool,
    ):
        self.graph, self.twins, self.tensors, self.has_masks = graph, twins, tensors, has_masks
        self.sizes, self.least = sizes, least
        self.values: dict[Node, Any] = {}
        self.known: dict[Node, torch.Tensor | None] = {}  # values that depend on no input
        self.replaced: dict[Node, tuple[Node, Value]] = {}  # what to read instead of results that are taken apart
        self.zeroed: set[Node] = set()  # values whose padding is zeros, corners included (rules/bounded.py)
        self.integers: list[Size] = []  # what each call brings
        self.reals: list[Size] = []
        self._shared: dict[Any, Node] = {}
        self._last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        value = next(node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
        self.mode, self.device = value.fake_mode, value.device
        self.inputs: dict[str, Node] = {}  # placeholders of these numbers
        for name in (INTEGERS, REALS):
            with graph.inserting_after(self._last):
                self.inputs[name] = self._last = graph.placeholder(name)

    # -- what is known ------------------------------------------------------------------------------------------------

    def value(self, node: Node) -> Value:
        """What is known of a tensor."""
        if node not in self.values:  # a rule's own: of the dimensions that its rule gave it, or a static one
            self.values[node] = Value(tuple(dim_of(n) for n in node.meta["val"].shape))
        return self.values[node]

    def shape(self, node: Node) -> list[Size]:
        """The symbolic sizes of a node's first result."""
        value = self.twins[node.name].meta["val"]
        return [size_of(n) for n in (value[0] if isinstance(value, tuple | list) else value).shape]

    def given(self, node: Node) -> dict[str, Any]:
        """A node's arguments by the names of the operator's schema, defaults filled in; symbolic sizes as they are."""
        twin, schema = self.twins[node.name], node.target._schema.arguments  # type: ignore[union-attr]
        names = [argument.name for argument in schema]
        pairs = {
            **dict(zip(names, zip(node.args, twin.args))),
            **{k: (v, twin.kwargs[k]) for k, v in node.kwargs.items()},
        }
        found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        return {**found, **{name: _symbolic(*pair) for name, pair in pairs.items()}}

    def has_symbols(self, node: Node) -> bool:
        """Whether a node's arguments have symbolic sizes or numbers among them."""
        twin = self.twins[node.name]
        return any(isinstance(x.meta.get("val"), SYMBOLIC) for x in twin.all_input_nodes)

    def refuse(self, node: Node, why: str) -> UnsupportedError:
        """The error for a node whose padding cannot be kept from its result."""
        lines = (node.meta.get("stack_trace") or "").strip().splitlines()
        line = f", {lines[-2].strip()}" if len(lines) > 1 else ""
        where = module_path(node) or "the root module"
        return UnsupportedError(
            f"{operator_name(node)} in {where}{line}: {why}, so one kernel cannot serve a range of shapes here; {LAZY}"
        )

    # -- what rules write ---------------------------------------------------------------------------------------------

    def emit(self, before: Node, target, *args, value: Value | None = None, **kwargs) -> Node:
        """A new node before another; `value` is what is known of its result."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: x for key, x in before.meta.items() if key in KEPT}
        node.meta["val"] = self._result(target, args, kwargs)
        if value is not None:
            self.values[node] = value
        return node

    def number(self, size: Size | Real) -> Node | int:
        """A size at run time, an int64 tensor without dimensions; float64 for a real number."""
        if isinstance(size, int):
            return size
        is_real = isinstance(size, Real)
        listed, name, expression = (self.reals, REALS, size.of) if is_real else (self.integers, INTEGERS, size)
        if expression not in listed:
            listed.append(expression)
        place = listed.index(expression)
        key = "number", name, place
        if key not in self._shared:
            with self.mode:
                value = torch.empty((), dtype=torch.float64 if is_real else torch.int64, device=self.device)
            self._share(key, aten.select.int, self.inputs[name], 0, place, value=value)
        return self._shared[key]

    def kept(self, dim: Dim, device: torch.device) -> Node:
        """Which places of a dimension are no padding: a vector of bool."""
        key = ("kept", dim, device)
        if key not in self._shared:
            ranks = len(dim)
            found = None
            for number, factor in enumerate(dim):
                if isinstance(factor, int):
                    continue
                places = self._share(
                    ("places", at(factor, self.sizes), device),
                    *(aten.arange.start_step, 0, at(factor, self.sizes)),
                    device=device,
                )
                mine = self._share(("below", factor, device), aten.lt.Tensor, places, self.number(factor))
                if ranks > 1:
                    mine = self._share(None, aten.view.default, mine, [-1] + [1] * (ranks - 1 - number))
                found = mine if found is None else self._share(None, aten.logical_and.default, found, mine)
            if ranks > 1:
                whole = [at(factor, self.sizes) for factor in dim]
                found = self._share(None, aten.expand.default, found, whole)
                found = self._share(None, aten.reshape.default, found, [at(length(dim), self.sizes)])
            assert found is not None, "the dimension has padding"
            self._shared[key] = found
        return self._shared[key]

    def spread(self, before: Node, vector: Node, axis: int, rank: int) -> Node:
        """A vector along an axis of a tensor of this rank."""
        if axis == rank - 1:
            return vector
        return self.emit(before, aten.view.default, vector, [-1] + [1] * (rank - 1 - axis))

    def filled(
        self, node: Node, axes: Collection[int], fill: float | bool, before: Node, is_exact: bool = False
    ) -> Node:
        """`node`, in its dtype, with `fill` in the padding of some dimensions.

        Padding that is NaN where all of its row is counts as filled, but where the fill must be exact.
        """
        value, dtype = self.value(node), node.meta["val"].dtype
        axes = [axis for axis in axes if is_padded(value.dims[axis])]
        if not axes:
            return node
        if (own := _in_kind(fill, dtype)) is None:
            raise self.refuse(before, f"its padding must be {fill}, which {dtype} does not hold")
        known = {n: x for n, x in value.fills.items() if not (is_exact and isinstance(x, OfRow))}
        left = [axis for axis in axes if known.get(axis) != own]
        if len(left) < len(axes) and len(axes) > 1:
            left = axes  # what is known of a dimension says nothing of corners
        for axis in left:
            kept = self.kept(value.dims[axis], node.meta["val"].device)
            kept = self.spread(before, kept, axis, len(value.dims))
            value = Value(value.dims, {**value.fills, axis: own})
            if dtype == torch.bool:
                operator = aten.logical_or.default if own else aten.logical_and.default
                kept = self.emit(before, aten.logical_not.default, kept) if own else kept
                node = self.emit(before, operator, node, kept, value=value)
            else:
                node = self.emit(before, aten.where.ScalarOther, kept, node, own, value=value)
        if node.meta["val"].dtype != dtype:
            raise self.refuse(before, f"its padding as {fill} would make {node.meta['val'].dtype} of {dtype}")
        return node

    def compacted(self, node: Node, axis: int, before: Node) -> Node:
        """`node` with the padding of a dimension at its end, by gathering what is no padding."""
        value = self.value(node)
        dim = value.dims[axis]
        if len(dim) < 2:
            return node
        device, total = node.meta["val"].device, node.meta["val"].shape[axis]
        rest = self.emit(before, aten.arange.start_step, 0, total, device=device)
        places, stride = None, 1
        for place, factor in reversed(list(enumerate(dim))):
            digit = rest
            if place:
                number = self.number(factor)
                digit = self.emit(before, aten.remainder.Tensor, rest, number)
                rest = self.emit(before, aten.floor_divide.default, rest, number)
            digit = digit if stride == 1 else self.emit(before, aten.mul.Tensor, digit, stride)
            places = digit if places is None else self.emit(before, aten.add.Tensor, places, digit)
            stride *= at(factor, self.sizes)
        places = self.emit(before, aten.clamp.default, places, 0, total - 1)
        dims = (*value.dims[:axis], (length(dim),), *value.dims[axis + 1 :])
        known = Value(dims, {n: fill for n, fill in value.fills.items() if n != axis})
        return self.emit(before, aten.index_select.default, node, axis, places, value=known)

    def compact_argument(self, node: Node, axes: Collection[int], name: str = "self") -> Value:
        """Let a node read its tensor with the padding of some dimensions at their ends; what is known of that."""
        x = self.given(node)[name]
        for axis in axes:
            x = self.compacted(x, axis, node)
        if any(len(self.value(x).dims[axis]) > 1 for axis in axes):
            raise self.refuse(node, "a dimension has padding inside")
        self.set_argument(node, name, x)
        return self.value(x)

    def cast(self, node: Node, dtype: torch.dtype, before: Node) -> Node:
        """`node` in another dtype."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.emit(before, aten._to_copy.default, node, dtype=dtype, value=self.value(node))

    def replace(self, node: Node, new: Node, value: Value) -> None:
        """Let readers of a node read another, in the same dtype."""
        new = self.cast(new, node.meta["val"].dtype, node)
        node.replace_all_uses_with(new)
        self.values[new] = self.values[node] = value
        self.graph.erase_node(node)

    def set_argument(self, node: Node, name: str, x) -> None:
        """Change an argument of a node."""
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        place = names.index(name)
        if name in node.kwargs or place >= len(node.args):
            node.kwargs = {**node.kwargs, name: x}
        else:
            node.args = (*node.args[:place], x, *node.args[place + 1 :])

    def constant(self, node: Node, most: int) -> torch.Tensor | None:
        """The tensor that a node is in every call; None if it depends on an input or has more than `most` elements.

        It is on the CPU, wherever the model is: a fork of a process that has used a GPU cannot compute on it.
        """
        if node not in self.known:
            self.known[node] = self._computed(node, most)
        return self.known[node]

    def _computed(self, node: Node, most: int) -> torch.Tensor | None:
        if node.op == "placeholder":
            stored = self.tensors.get(node.name)
            return None if stored is None else stored.cpu()
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() > most:
            return None
        operands = {x: self.constant(x, most) for x in node.all_input_nodes}
        if any(x is None for x in operands.values()):
            return None
        given = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        args, kwargs = pytree.tree_map_only(torch.device, lambda device: torch.device("cpu"), given)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # it is a function's node

    def _share(self, key, target, *args, value=None, **kwargs) -> Node:
        """A node at the beginning of the graph, where all others can read it; that of an equal key if there is one."""
        if key is not None and key in self._shared:
            return self._shared[key]
        with self.graph.inserting_after(self._last):
            self._last = node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self._result(target, args, kwargs) if value is None else value
        if key is not None:
            self._shared[key] = node
        return node

    def _result(self, target, args, kwargs):
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda x: x.meta["val"])
        with self.mode:
            return target(*args, **kwargs)


def _in_kind(fill: float | bool, dtype: torch.dtype) -> float | bool | None:
    """A fill as a number of a dtype's kind; None where the dtype does not hold it."""
    if dtype.is_complex or (dtype.is_floating_point and not math.isfinite(fill)):
        return fill
    if dtype.is_floating_point:
        return fill if abs(fill) <= torch.finfo(dtype).max else None
    if not math.isfinite(fill) or fill != int(fill):
        return None
    if dtype == torch.bool:
        return bool(fill) if fill in (0, 1) else None
    limits = torch.iinfo(dtype)
    return int(fill) if limits.min <= int(fill) <= limits.max else None


def _symbolic(fixed, twin):
    """An argument of a node at fixed sizes, with the expressions that its twin's has."""
    if isinstance(twin, list | tuple):
        return [_symbolic(x, y) for x, y in zip(fixed, twin, strict=True)]
    value = twin.meta.get("val") if isinstance(twin, Node) else None
    if isinstance(value, torch.SymFloat):
        return Real(value.node.expr)
    if isinstance(value, torch.SymBool):
        raise UnsupportedError(f"{twin.name} is a truth value of sizes that enters the computation; {LAZY}")
    return size_of(value) if isinstance(value, torch.SymInt) else fixed
