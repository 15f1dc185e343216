"""Code of a group's values for one vector: a thread's `VECTOR` neighbours of a result, each from the places it needs.

These functions run while a kernel is parsed and write out its code.  A value's lanes are expressions: one if all lanes
are equal, else VECTOR.  What is computed lies in registers and is computed once for the same places.  Where a condition
is the same for all lanes, the kernel branches; else it selects lane by lane, and reads only places that exist.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.cuda.ptx import element
from tir_kernels.fusion.group.indices import broadcast, flatten, of_reduction, of_view
from tir_kernels.fusion.group.operators import ELEMENTWISE
from tir_kernels.fusion.group.problem import NORMS, REDUCTIONS, GroupProblem, Tensor, Value
from tir_kernels.fusion.group.runs import runs_of
from tir_kernels.fusion.group.symbols import Symbols, depends
from tir_kernels.fusion.problem import DTYPES
from tir_kernels.fusion.rows.statistics import local_buffers, tree
from tir_kernels.fusion.steps import VECTOR

Lanes = list[Any]
WORD = 4  # bytes of a register


def register_dtype(dtype: str) -> str:
    """The dtype in which a kernel computes with values of a dtype."""
    return "float32" if dtype in DTYPES else dtype


@T.inline
def assign(buffer, at, value):
    buffer[at] = value


@T.inline
def branch(condition, then, otherwise):
    if condition:
        then()
    else:
        otherwise()


@T.inline
def guarded(condition, then):
    if condition:
        then()


def load_words(words, count: int, pointer: Callable) -> None:
    """Load 1, 2, 4 or 8 words that the kernel only reads, 16 bytes at a time; `pointer(i)` is the address of word i."""
    each = min(count, 4)
    instruction = f"ld.global.nc.v{each}.b32" if each > 1 else "ld.global.nc.b32"
    for i in range(0, count, each):
        T.evaluate(T.ptx[instruction](*(words[i + j] for j in range(each)), pointer(i)))


def where(conditions: list, then: Callable) -> None:
    """Do it where all conditions hold, of which there may be none."""
    if not conditions:
        then()
    else:
        guarded(all_of(conditions), then)


class Emitter:
    """Emits values of a group at places that are expressions of symbols.

    `pairs` holds, for each norm's number, the registers of its row's shift and scale; `given`, for a number, the lanes
    that are known whatever the places.  `staged(number, position)` gives the lanes of a source that lie in shared
    memory, or None.  Without `any_order`, only neighbours in their order are loaded together.
    """

    def __init__(self, problem: GroupProblem, buffers: Sequence, symbols: Symbols, any_order: bool = True):
        self.problem, self.buffers, self.symbols, self.any_order = problem, buffers, symbols, any_order
        self.pairs: dict[int, Any] = {}
        self.given: dict[int, Lanes] = {}
        self.staged: Callable[[int, Any], Lanes | None] = lambda number, position: None
        self.known: dict[tuple, Lanes] = {}
        self.count = 0  # of buffers, for their names

    def lanes(self, number: int, indices: Sequence) -> Lanes:
        """The elements of a value at `indices`, which may depend on the lane."""
        if number in self.given:
            return self.given[number]
        indices = self.symbols.simplified(indices)
        key = number, *map(str, indices)
        if key not in self.known:
            value = self.problem.value(number)
            self.known[key] = (
                self._load(number, value, indices)
                if isinstance(value, Tensor)
                else self._computed(number, value, indices)
            )
        return self.known[key]

    def _computed(self, number: int, value: Value, indices: Sequence) -> Lanes:
        if value.operator == "constant":
            return [tirx.const(value.numbers[0], register_dtype(value.dtype))]
        if value.operator == "concat":
            return self._concat(value, indices)
        if value.operator == "pad":
            return self._pad(value, indices)
        if value.operator == "gather":
            return self._gather(value, indices)
        if value.operator == "rows":
            return self._rows(value, indices)
        if value.operator in REDUCTIONS:
            return self._sum(value, indices)
        if value.operator in NORMS:
            return self._norm(number, value, indices)
        arguments = [(a, self.problem.value(a)) for a in value.arguments]
        if value.operator in ELEMENTWISE or value.operator == "cast":
            found = [self.lanes(a, broadcast(indices, x.shape)) for a, x in arguments]
            if value.operator == "cast":
                (lanes,) = found
                return [_cast(x, arguments[0][1].dtype, value.dtype) for x in lanes]
            return self._elementwise(value, found)
        ((argument, source),) = arguments
        return self.lanes(argument, of_view(value, indices, source.shape))

    def _elementwise(self, value: Value, arguments: list[Lanes]) -> Lanes:
        expression = ELEMENTWISE[value.operator].expression
        count = max(map(len, arguments))
        found = [expression(*(x[i % len(x)] for x in arguments), *value.numbers) for i in range(count)]
        return self._kept(found, register_dtype(value.dtype))

    def _kept(self, lanes: Lanes, dtype: str) -> Lanes:
        """The lanes, in registers of their own; booleans are computed where they are used."""
        if dtype == "bool":
            return lanes
        buffer = self._registers(len(lanes), dtype)
        for i, lane in enumerate(lanes):
            assign(buffer, i, lane)
        return [buffer[i] for i in range(len(lanes))]

    def _registers(self, size: int, dtype: str):
        self.count += 1
        return local_buffers(f"x{self.count}_", 1, size, dtype)[0]

    # -- sources ---------------------------------------------------------------------------------------------------

    def _load(self, number: int, source: Tensor, indices: Sequence) -> Lanes:
        symbols, buffer, dtype = self.symbols, self.buffers[number], source.dtype
        position = symbols.analyzer.simplify(flatten(indices, source.shape))
        if not depends(position, symbols.lane):
            loaded = _cast(buffer[symbols.in_registers(position)], dtype, register_dtype(dtype))
            return self._kept([loaded], register_dtype(dtype))
        if (lanes := self.staged(number, position)) is not None:
            return self._kept(lanes, register_dtype(dtype))
        if dtype in (*DTYPES, "int32"):
            runs = runs_of(symbols, position, math.prod(source.shape), self.any_order)
            if runs is not None:
                words = [self._run(number, dtype, first, runs.width) for first in runs.firsts]
                return [_element(words[run], i, dtype) for run, i in runs.places]
        loaded = [_cast(buffer[symbols.in_registers(position, i)], dtype, register_dtype(dtype)) for i in range(VECTOR)]
        return self._kept(loaded, register_dtype(dtype))

    def _run(self, number: int, dtype: str, first, width: int) -> Lanes:
        """The words of the `width` elements of a source from position `first` on, a multiple of `width`."""
        key = "run", number, width, str(first)  # what picks other elements of it, as of pairs, shares the load
        if key not in self.known:
            size = width * tvm.DataType(dtype).itemsize // WORD
            words = self._registers(size, "uint32")
            at = scalar("at", self.symbols.in_registers(first))
            load_words(words, size, lambda i: self.buffers[number].ptr_to([at + i * width // size]))
            self.known[key] = [words[i] for i in range(size)]
        return self.known[key]

    # -- values of several parts -----------------------------------------------------------------------------------

    def _concat(self, value: Value, indices: Sequence) -> Lanes:
        axis = int(value.numbers[0])
        ends, parts = 0, []
        for argument in value.arguments:
            begin, ends = ends, ends + self.problem.value(argument).shape[axis]
            parts.append((argument, begin, ends))
        index, symbols = indices[axis], self.symbols
        reached = [
            part for part in parts if not symbols.is_known(index < part[1]) and not symbols.is_known(index >= part[2])
        ]
        if len(reached) == 1:
            ((argument, begin, _),) = reached
            return self.lanes(argument, _replaced(indices, axis, index - begin))
        if not self._is_uniform(index, [end for *_, end in reached]):
            return self._selected(value, indices, axis, reached)
        buffer = self._registers(VECTOR, register_dtype(value.dtype))
        self._branches(buffer, indices, axis, reached)
        return [buffer[i] for i in range(VECTOR)]

    def _branches(self, buffer, indices: Sequence, axis: int, parts: list) -> None:
        """Store the lanes of the part that holds the vector, all others untouched."""
        (argument, begin, end), *rest = parts
        index = self.symbols.at(indices[axis], 0)

        def then():
            self._into(buffer, lambda: self.lanes(argument, _replaced(indices, axis, indices[axis] - begin)))

        if not rest:
            then()
            return
        condition = self.symbols.in_registers(index < end)
        branch(condition, then, lambda: self._branches(buffer, indices, axis, rest))

    def _into(self, buffer, emit: Callable[[], Lanes]) -> None:
        """Store lanes in a buffer; what only this branch computes is unknown after it."""
        before = dict(self.known)
        lanes = emit()
        for i in range(VECTOR):
            assign(buffer, i, lanes[i % len(lanes)])
        self.known = before

    def _selected(self, value: Value, indices: Sequence, axis: int, parts: list) -> Lanes:
        """Lane by lane: each part at the place nearest to the lane's, and the part that holds the lane."""
        index = indices[axis]
        found: Lanes = []
        for argument, begin, end in reversed(parts):
            nearest = self.symbols.inside(index - begin, end - begin)
            lanes = self.lanes(argument, _replaced(indices, axis, nearest))
            if not found:
                found = lanes
                continue
            inside = [self.symbols.in_registers(index < end, i) for i in range(VECTOR)]
            found = [T.Select(inside[i], lanes[i % len(lanes)], found[i % len(found)]) for i in range(VECTOR)]
        return self._kept(found, register_dtype(value.dtype))

    def _pad(self, value: Value, indices: Sequence) -> Lanes:
        (argument,) = value.arguments
        source, symbols = self.problem.value(argument).shape, self.symbols
        outside = symbols.simplified(of_view(value, indices, source))
        limits = [
            (index, n)
            for index, n in zip(outside, source)
            if not (symbols.is_known(index >= 0) and symbols.is_known(index < n))
        ]
        if not limits:
            return self.lanes(argument, outside)
        dtype = register_dtype(value.dtype)
        filling = tirx.const(value.numbers[0], dtype)

        def inside(lane):
            return symbols.in_registers(all_of([tirx.And(index >= 0, index < n) for index, n in limits]), lane)

        if all(self._is_uniform(index, [0, n]) for index, n in limits):
            buffer = self._registers(VECTOR, dtype)
            branch(
                inside(0),
                lambda: self._into(buffer, lambda: self.lanes(argument, outside)),
                lambda: self._into(buffer, lambda: [filling]),
            )
            return [buffer[i] for i in range(VECTOR)]
        nearest = [symbols.inside(index, n) for index, n in zip(outside, source)]
        lanes = self.lanes(argument, nearest)
        return self._kept([T.Select(inside(i), lanes[i % len(lanes)], filling) for i in range(VECTOR)], dtype)

    def _is_uniform(self, index, limits: Sequence[int]) -> bool:
        """Whether all lanes are on the same side of each limit."""
        if not depends(index, self.symbols.lane):
            return True
        first = self.symbols.first_of_neighbours(index)
        return (
            first is not None
            and self.symbols.is_multiple(first, VECTOR)
            and all(limit % VECTOR == 0 for limit in limits)
        )

    def _gather(self, value: Value, indices: Sequence) -> Lanes:
        """The elements at places that the kernel reads; places outside are those of the nearest element."""
        x, places = value.arguments
        axis, symbols = int(value.numbers[0]), self.symbols
        extent = self.problem.value(x).shape[axis]
        found = []
        for i, place in enumerate(lanes := self.lanes(places, indices)):
            self.count += 1
            var = symbols.new(f"place{self.count}", extent)
            inside = T.max(T.min(T.cast(place, "int32"), extent - 1), 0)
            symbols.registers[var] = scalar("place", inside)
            at = indices if len(lanes) == 1 else [symbols.at(index, i) for index in indices]
            part = self.lanes(x, _replaced(at, axis, var))
            found += part if len(lanes) == 1 else self._only(part, i)
        return found

    @staticmethod
    def _only(lanes: Lanes, i: int) -> Lanes:
        """One lane, of a value at a lane's own places, which may have been computed for a whole vector of them."""
        return [lanes[i % len(lanes)]]

    def _rows(self, value: Value, indices: Sequence) -> Lanes:
        """Slices at places that the kernel reads, one for all lanes where the places are those of one slice."""
        x, places = value.arguments
        (axis, is_missing), symbols = map(int, value.numbers), self.symbols
        end, extent = axis + len(self.problem.value(places).shape), self.problem.value(x).shape[axis]
        found: Lanes = []
        for i, place in enumerate(lanes := self.lanes(places, indices[axis:end])):
            self.count += 1
            var = symbols.new(f"place{self.count}", extent)
            symbols.registers[var] = scalar("place", _nearest(place, extent))
            at = [*indices[:axis], var, *indices[end:]]
            at = at if len(lanes) == 1 else [symbols.at(index, i) for index in at]
            part = self.lanes(x, at)
            if is_missing:
                inside = scalar("inside", T.cast(T.And(place >= 0, place < extent), "int32"))
                part = self._kept([T.Select(inside != 0, lane, T.float32("nan")) for lane in part], "float32")
            found += part if len(lanes) == 1 else self._only(part, i)
        return found

    def _sum(self, value: Value, indices: Sequence) -> Lanes:
        """The sum, of which every term is written out, so that their loads are under way together."""
        (argument,) = value.arguments
        shape = self.problem.value(argument).shape
        terms = []
        for places in product(*(range(shape[int(axis)]) for axis in value.numbers)):
            at = [tirx.IntImm("int32", place) for place in places]
            terms.append(self.lanes(argument, of_reduction(value, indices, shape, at)))
        count = max(map(len, terms))
        sums = [tree([term[i % len(term)] for term in terms]) for i in range(count)]
        if value.operator == "mean":
            sums = [x / T.float32(len(terms)) for x in sums]
        return self._kept(sums, register_dtype(value.dtype))

    # -- norms -----------------------------------------------------------------------------------------------------

    def _norm(self, number: int, value: Value, indices: Sequence) -> Lanes:
        x, *vectors = value.arguments
        _, *follow = value.numbers
        pair, lanes = self.pairs[number], self.lanes(x, indices)
        if value.operator == "layer_norm":
            found = [(lane - pair[0]) * pair[1] for lane in lanes]
        else:
            found = [lane * pair[1] for lane in lanes]
        remaining = iter(vectors)
        for kind, follows in zip(("weight", "bias"), follow):
            if follows:
                other = self.lanes(next(remaining), indices[-1:])
                count = max(len(found), len(other))
                pairs = [(found[i % len(found)], other[i % len(other)]) for i in range(count)]
                found = [a * b for a, b in pairs] if kind == "weight" else [a + b for a, b in pairs]
        return self._kept(found, "float32")


def _element(words, i: int, dtype: str):
    """Element i of a vector in registers."""
    return T.reinterpret("int32", words[i]) if dtype == "int32" else element(words, 0, i, dtype)


def _cast(x, source: str, dtype: str):
    """A value in registers as a value of another dtype in registers."""
    wanted = register_dtype(dtype)
    return x if register_dtype(source) == wanted and str(x.ty.dtype) == wanted else T.cast(x, wanted)


def _nearest(place, extent: int):
    """A place that a kernel read, or the nearest one below `extent`, as int32."""
    return T.cast(T.max(T.min(place, tirx.const(extent - 1, place.ty.dtype)), tirx.const(0, place.ty.dtype)), "int32")


def _replaced(indices: Sequence, axis: int, index) -> list:
    return [*indices[:axis], index, *indices[axis + 1 :]]


def all_of(conditions: list):
    """All of at least one condition."""
    found = conditions[0]
    for condition in conditions[1:]:
        found = tirx.And(found, condition)
    return found
