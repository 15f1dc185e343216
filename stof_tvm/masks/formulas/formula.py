"""A mask_mod as a formula, so that most elements need not be computed.

The function is traced once.  Each value in its graph is of one of three kinds:

- it depends on q_idx alone, on kv_idx alone, or on q_idx - kv_idx alone: a `Vector`, computed for all of them at once;
- it depends on neither: a constant;
- it depends on both otherwise: computed for a block's elements, unless bounds (`bounds.py`) decide the block.

A window, a diagonal, a prefix or a dilation is one vector, and a document mask two with one comparison.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stof_tvm.masks import pattern
from stof_tvm.masks.formulas.bounds import Bounds, constant_bounds, result_bounds, table_bounds
from stof_tvm.masks.formulas.device_bitmap import packed
from stof_tvm.masks.formulas.integers import Integers
from stof_tvm.masks.formulas.values import COLUMN, OFFSET, ROW, Mixed, Vector
from tir_kernels.masks.block_sparse import EMPTY

aten = torch.ops.aten
# Computed element by element, though they lack the tag that says so.
ELEMENTWISE = {aten.floor_divide.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
# Of a sorted constant: searching is done for each element by itself.
SEARCHES = {aten.searchsorted.Tensor, aten.bucketize.Tensor}
# Constants that take no more than the dtype and device of an operand.
FILLED = {aten.new_ones, aten.new_zeros, aten.new_full, aten.ones_like, aten.zeros_like, aten.full_like}
# (x + n, y + n) gives what (x, y) gives.
TRANSLATION_INVARIANT = {aten.sub, aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne}
LARGEST_SHIFT = 1 << 40
INTEGERS_AT_ONCE = 1 << 24  # elements of which bits are held, and a chunk for each thread


class NoFormula(Exception):
    """The function computes something that is not known element by element."""


def formula_pattern(mask_mod, b: int, h: int, q_len: int, kv_len: int, device: str) -> pattern.Pattern | None:
    """The pattern of a mask_mod for one batch entry and head; None where no formula is found.

    A function that fails, or gives no boolean, has no formula.  Some fail only where elements are computed: then the
    pattern's methods raise what the function does.
    """
    try:
        value = _Reader(q_len, kv_len, device).read(_traced(mask_mod, device), b, h)
    except Exception:  # whatever the function raises is told when its elements are computed
        return None
    return _pattern(value, q_len, kv_len, device)


def _pattern(value, q_len: int, kv_len: int, device: str) -> pattern.Pattern:
    """The pattern of a bool; operators of logic combine the patterns of their operands."""
    if isinstance(value, Mixed):
        if value.function.overloadpacket not in COMBINED or not all(map(_is_bool, value.args)):
            return MixedPattern(value, q_len, kv_len, device)
        return COMBINED[value.function.overloadpacket](*(_pattern(x, q_len, kv_len, device) for x in value.args))
    if isinstance(value, Vector):
        member = value.values.cpu().numpy()
        if value.axis == OFFSET:
            return pattern.Offsets(q_len, kv_len, lambda _: member)
        return (pattern.Rows if value.axis == ROW else pattern.Columns)(member)
    return pattern.Rows(np.full(q_len, bool(value)))


def _is_bool(value) -> bool:
    """Whether a value is a bool, and not a table of them."""
    if isinstance(value, Vector):
        return value.values.dtype == torch.bool
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.bool and value.numel() == 1
    return isinstance(value, bool) or isinstance(value, Mixed) and value.dtype == torch.bool


def _chosen(condition, a, b) -> pattern.Pattern:
    return pattern.union(pattern.intersection(condition, a), pattern.intersection(pattern.complement(condition), b))


def _xor(a, b) -> pattern.Pattern:
    return _chosen(a, pattern.complement(b), b)


COMBINED: dict[Any, Callable] = {
    aten.bitwise_and: pattern.intersection, aten.logical_and: pattern.intersection, aten.mul: pattern.intersection,
    aten.bitwise_or: pattern.union, aten.logical_or: pattern.union,
    aten.bitwise_not: pattern.complement, aten.logical_not: pattern.complement,
    aten.bitwise_xor: _xor, aten.logical_xor: _xor, aten.where: _chosen,
}  # fmt: skip


def _traced(mask_mod, device: str) -> fx.Graph:
    """The graph of the function under vmap, as `create_mask` calls it, for one element: all its values are (1,)."""
    arguments = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    module = make_fx(torch.vmap(lambda *x: mask_mod(*x)))(*arguments)
    module.graph.eliminate_dead_code()
    return module.graph


class _Reader:
    """Reads a graph into the value of its result."""

    def __init__(self, q_len: int, kv_len: int, device: str):
        offsets = torch.arange(1 - q_len, kv_len, device=device)
        # For each offset, one pair of indices that has it.
        self.of_offset = {ROW: (-offsets).clamp(min=0), COLUMN: offsets.clamp(min=0)}
        self.rows, self.columns = (torch.arange(length, device=device) for length in (q_len, kv_len))
        self.device = device

    def read(self, graph: fx.Graph, b: int, h: int):
        """The value of the graph's result: bool, as a Vector, a Mixed or a constant tensor of one element."""
        constants = (torch.tensor([n], device=self.device) for n in (b, h))
        values: dict[fx.Node, Any] = {}
        inputs = iter((*constants, Vector(ROW, self.rows, 0), Vector(COLUMN, self.columns, 0)))
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(graph.owning_module, node.target)
            elif node.op == "call_function":
                values[node] = self._value(node, values)
            elif node.op == "output":
                (result,) = node.all_input_nodes
                if result.meta["val"].dtype != torch.bool or result.meta["val"].shape != (1,):
                    raise NoFormula
                return values[result]
        raise NoFormula

    def _value(self, node: fx.Node, values: dict):
        function: Any = node.target
        lookup = lambda x: values[x] if isinstance(x, fx.Node) else x
        args, kwargs = fx.node.map_aggregate(node.args, lookup), fx.node.map_aggregate(node.kwargs, lookup)
        operands = [x for x in map(values.get, node.all_input_nodes) if isinstance(x, Vector | Mixed)]
        if function._schema.is_mutable or any(isinstance(x, Vector | Mixed) for x in kwargs.values()):
            raise NoFormula
        if not operands:
            return function(*args, **kwargs)
        if function.overloadpacket in FILLED:
            example = node.all_input_nodes[0].meta["val"]
            like = torch.zeros(example.shape, dtype=example.dtype, device=self.device)
            return function(like, *args[1:], **kwargs)
        if node.meta["val"].shape != (1,) or not _is_elementwise(function, args, kwargs):
            raise NoFormula
        axes = {x.axis for x in operands if isinstance(x, Vector)}
        if axes == {ROW, COLUMN} and not kwargs and _keeps_under_translation(function, args):
            pairs = lambda x: x.values[self.of_offset[x.axis]]
            return Vector(OFFSET, function(*map(pairs, args)))
        if len(axes) > 1 or any(isinstance(x, Mixed) for x in operands):
            return Mixed(function, args, kwargs, node.meta["val"].dtype)
        (axis,) = axes
        result = function(*fx.node.map_aggregate(args, _values), **kwargs)
        return Vector(axis, result, _shift(function, args, kwargs))


def _values(x):
    return x.values if isinstance(x, Vector) else x


def _is_elementwise(function, args: tuple, kwargs: dict) -> bool:
    """Whether an operator computes each element of its result from the elements at the same index."""
    if function is aten._to_copy.default:
        return set(kwargs) == {"dtype"}
    if function in SEARCHES:
        return isinstance(args[0 if function is aten.searchsorted.Tensor else 1], torch.Tensor)
    if function is aten.index.Tensor:  # of a constant table
        return isinstance(args[0], torch.Tensor) and all(x is not None for x in args[1])
    return torch.Tag.pointwise in function.tags or function in ELEMENTWISE


def _keeps_under_translation(function, args: tuple) -> bool:
    is_index = lambda x: isinstance(x, Vector) and x.shift is not None
    return function.overloadpacket in TRANSLATION_INVARIANT and len(args) == 2 and all(map(is_index, args))


def _shift(function, args: tuple, kwargs: dict) -> int | None:
    """How far the sum of an index and a constant lies from the index; None for anything else."""
    sign = {aten.add: 1, aten.sub: -1}.get(function.overloadpacket)
    if sign is None or kwargs or len(args) != 2:
        return None
    if sign == 1 and isinstance(args[1], Vector):
        args = args[::-1]
    index, step = args
    if not isinstance(index, Vector) or index.shift is None or index.axis == OFFSET:
        return None
    if isinstance(step, torch.Tensor) and step.numel() == 1 and step.dtype == torch.int64:
        step = int(step)
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    shift = index.shift + sign * step
    return shift if abs(shift) < LARGEST_SHIFT else None


class MixedPattern(pattern.Pattern):
    """The pattern of a value that depends on both indices."""

    def __init__(self, value: Mixed, q_len: int, kv_len: int, device: str):
        self.value, self.zero, self.device = value, q_len - 1, device
        self.lengths = q_len, kv_len
        self.integers = Integers.of(value, self.zero) if device == "cpu" else None
        if device != "cpu":
            self.elements_at_once = pattern.ON_DEVICE_AT_ONCE
        elif self.integers is not None:
            self.elements_at_once = INTEGERS_AT_ONCE
        self.offsets: dict[int, pattern.Offsets] = {}  # id of a Vector of booleans -> its pattern
        self.sums: dict[int, dict] = {}  # id of a Mixed that reads a table -> what `table_bounds` knows of it

    def blocks(self, i0, i1, j0, j1, stride):
        bounds = self._bounds(self.value, (i0, i1, j0, j1, stride), {})
        if bounds is None:
            return np.full((len(i0), len(j0)), pattern.PART, np.int8)
        state = bounds.low.to(torch.int8) + bounds.high  # EMPTY, PART, FULL
        return np.array(state.expand(len(i0), len(j0)))

    def _bounds(self, x, ends: tuple, known: dict) -> Bounds | None:
        """Bounds of a value, on the CPU, in blocks with these ends, as `pattern.py` has them."""
        if not isinstance(x, Vector | Mixed):
            return constant_bounds(x.cpu() if isinstance(x, torch.Tensor) else x)
        if id(x) not in known:
            known[id(x)] = self._bounds_of_vector(x, *ends) if isinstance(x, Vector) else self._result(x, ends, known)
        return known[id(x)]

    def _result(self, x: Mixed, ends: tuple, known: dict) -> Bounds | None:
        if x.function is not aten.index.Tensor:
            args = [self._bounds(argument, ends, known) for argument in x.args]
            return result_bounds(x.function, x.dtype, args, x.kwargs)
        table, indices = x.args
        found = [self._bounds(index, ends, known) for index in indices]
        complete = [bounds for bounds in found if bounds is not None]
        if len(complete) < len(found):
            return None
        return table_bounds(table.cpu(), complete, self.sums.setdefault(id(x), {}))

    def _bounds_of_vector(self, x: Vector, i0, i1, j0, j1, stride) -> Bounds | None:
        if x.axis != OFFSET:
            first, last = (i0, i1) if x.axis == ROW else (j0, j1)
            bounds = Bounds.of_groups(x.values[self._tensor(_tokens(first, last, stride))])
            if bounds is None:
                return None
            bounds = Bounds(bounds.low.cpu(), bounds.high.cpu())
            return bounds if x.axis == ROW else bounds.T
        if x.values.dtype != torch.bool:
            first, last = j0 - i1[:, None] + self.zero, j1 - i0[:, None] + self.zero
            return Bounds.of_windows(x.values.cpu(), torch.from_numpy(first), torch.from_numpy(last))
        if id(x) not in self.offsets:
            member = x.values.cpu().numpy()
            self.offsets[id(x)] = pattern.Offsets(*self.lengths, lambda _: member)
        state = torch.from_numpy(self.offsets[id(x)].blocks(i0, i1, j0, j1, stride))
        return Bounds(state == pattern.FULL, state != EMPTY)

    def keep(self, i, j):
        return self._kept(i, j).cpu().numpy()

    def bits(self, i, j, stride):
        if self.integers is not None:
            return self.integers.bits(i, j)
        if self.device == "cpu":
            return super().bits(i, j, stride)
        return packed(self._kept(i, j).expand(*i.shape, j.shape[1]))

    def _kept(self, i, j) -> torch.Tensor:
        rows, columns = self._tensor(i)[:, :, None], self._tensor(j)[:, None, :]
        indices = {ROW: rows, COLUMN: columns}
        known: dict[int, torch.Tensor] = {}

        def at(x):
            if not isinstance(x, Vector | Mixed):
                return x
            if id(x) not in known:
                if isinstance(x, Vector) and x.axis not in indices:
                    indices[OFFSET] = columns - rows + self.zero
                known[id(x)] = x.values[indices[x.axis]] if isinstance(x, Vector) else x.compute(at)
            return known[id(x)]

        return at(self.value)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _tokens(first: np.ndarray, last: np.ndarray, stride: int) -> np.ndarray:
    """(n, size): every stride-th token from `first` to `last`, which repeats where there are fewer than elsewhere."""
    size = int((last - first).max()) // stride + 1
    return np.minimum(first[:, None] + np.arange(size) * stride, last[:, None])
