"""The division of a group's results into domains: results that one loop over elements computes together.

A domain's elements are walked in the order of its results' axes, the last ones innermost.  Where a norm is among what
the results are computed from, a row of the norm is a row of the domain: `row_axes` axes at the end of the order, which
a group of threads holds together.  The group has the statistics of one row: results that read other rows of the norm
at the same place, as of its flip, are in another domain.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.indices import broadcast, flatten, of_reduction, of_view
from tir_kernels.fusion.group.problem import NORMS, READS, REDUCTIONS, VIEWS, GroupProblem, Tensor, Value
from tir_kernels.fusion.group.symbols import Symbols, depends
from tir_kernels.fusion.steps import VECTOR


@dataclass(frozen=True)
class Domain:
    """Results of one shape, by their numbers; the order of their axes; the norm, or None; the axes of its rows."""

    results: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]
    norm: int | None = None
    row_axes: int = 1

    @property
    def extents(self) -> tuple[int, ...]:
        """The lengths of the axes in the domain's order."""
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def n(self) -> int:
        """Elements of a row."""
        return math.prod(self.extents[len(self.order) - self.row_axes :]) if self.order else 1

    @property
    def m(self) -> int:
        """Rows."""
        return math.prod(self.shape) // self.n

    def places(self, symbols: Symbols, vector) -> tuple[list[tuple[tirx.Var, int]], list]:
        """The rows' variables with their extents, outermost first, and the result's indices at a row's vector."""
        outer = len(self.order) - self.row_axes
        rows = [(symbols.new(f"i{axis}", n), n) for axis, n in enumerate(self.extents[:outer])]
        column, inner = vector * VECTOR + symbols.lane, []
        for position in range(outer, len(self.order)):
            later = math.prod(self.extents[position + 1 :])
            index = tirx.floordiv(column, later) if later > 1 else column
            inner.append(index if position == outer else tirx.floormod(index, self.extents[position]))
        ordered = [*(var for var, _ in rows), *inner]
        return rows, [ordered[self.order.index(axis)] for axis in range(len(self.shape))]


def domains_of(problem: GroupProblem) -> list[Domain]:
    """The domains of all results.  Raises UnsupportedError with the reason if a norm does not fit into any."""
    norms = {result: _norms(problem, result) for result in problem.results}
    groups: dict[tuple, list[int]] = {}
    for result in dict.fromkeys(problem.results):
        shape, found = problem.value(result).shape, norms[result]
        groups.setdefault((shape, found, _first_row(problem, result, found)), []).append(result)
    for key, results in list(groups.items()):
        shape, found, _ = key
        # What a norm reads and the model goes on with is computed beside the norm.
        for (other, norm, _), more in groups.items():
            if not found and norm and other == shape and all(_reads(problem, more[0], result) for result in results):
                more += results
                del groups[key]
                break
    return [_domain(problem, shape, sorted(norm), tuple(results)) for (shape, norm, _), results in groups.items()]


def _norms(problem: GroupProblem, result: int) -> frozenset[int]:
    found, pending = set(), [result]
    seen = set(pending)
    while pending:
        value = problem.value(number := pending.pop())
        if isinstance(value, Tensor):
            continue
        if value.operator in NORMS:
            found.add(number)
        pending += [a for a in value.arguments if a not in seen]
        seen.update(value.arguments)
    return frozenset(found)


def _first_row(problem: GroupProblem, result: int, norms: frozenset[int]) -> tuple[str, ...]:
    """The norm's row that an element of a result reads first, spelled in the element's indices; () unless one norm.

    That it reads no other one is for the domain to prove.
    """
    if len(norms) != 1:
        return ()
    symbols, (norm,) = Symbols(), norms
    indices = [symbols.new(f"i{axis}", n) for axis, n in enumerate(problem.value(result).shape)]
    return tuple(map(str, _norm_rows(problem, result, indices, norm, symbols)[0]))


def _reads(problem: GroupProblem, number: int, argument: int) -> bool:
    """Whether a value is computed from another one, elementwise all the way."""
    shape, pending, seen = problem.value(argument).shape, [number], {number}
    while pending:
        value = problem.value(pending.pop())
        if isinstance(value, Tensor) or value.shape != shape:
            continue
        if argument in value.arguments:
            return True
        pending += [a for a in dict.fromkeys(value.arguments) if a not in seen]
        seen.update(value.arguments)
    return False


def _domain(problem: GroupProblem, shape, norms: list[int], results: tuple[int, ...]) -> Domain:
    rank = len(shape)
    if not norms:
        return Domain(results, shape, tuple(range(rank)))
    if len(norms) > 1:
        raise UnsupportedError("a result of several norms")
    (norm,) = norms
    n = problem.value(norm).shape[-1]
    others = [tuple(range(rank))] if rank else []
    others += [(*(a for a in range(rank - 1) if a != axis), axis, rank - 1) for axis in range(rank - 1)]
    for order in others:
        in_place = order == others[0]  # a vector of the row lies in a vector of the result, over the last axes together
        for row_axes in range(1, rank + 1 if in_place else min(2, rank) + 1):
            domain = Domain(results, shape, order, norm, row_axes)
            if domain.n == n and n % VECTOR == 0 and (in_place or shape[-1] % VECTOR == 0):
                if all(_holds_rows(problem, domain, result) for result in results):
                    return domain
    raise UnsupportedError(f"rows of {n} of {problem.computed(norm).operator} are no rows of a result {shape}")


def _holds_rows(problem: GroupProblem, domain: Domain, result: int) -> bool:
    """Whether each row of the domain reads one row of the norm, at the same columns or others."""
    symbols = Symbols()
    vector = symbols.new("vector", domain.n // VECTOR)
    _, indices = domain.places(symbols, vector)
    rows = _norm_rows(problem, result, indices, domain.norm, symbols)
    return all(
        not depends(index, vector) and not depends(index, symbols.lane) for row in rows for index in row
    ) and all(str(row) == str(rows[0]) for row in rows)


def norm_indices(problem: GroupProblem, domain: Domain, symbols: Symbols, indices: list) -> list:
    """The indices of the norm's row that all results at `indices` read; outside of it in the filling of a pad."""
    return _norm_rows(problem, domain.results[0], indices, domain.norm, symbols)[0]


def _norm_rows(problem: GroupProblem, result: int, indices: list, norm, symbols: Symbols) -> list[list]:
    """The outer indices at which the norm is read for the result at `indices`, in the order of the reads."""
    rows: list[list] = []
    seen: set[tuple] = set()
    above = {number for number in range(len(problem.sources), result + 1) if norm in _norms(problem, number)}

    def visit(number: int, at: list) -> None:
        at = symbols.simplified(at)
        if (key := (number, *map(str, at))) in seen or number not in above:
            return
        seen.add(key)
        if number == norm:
            rows.append(at[:-1])
            return
        value = problem.computed(number)
        if value.operator in (*READS, *REDUCTIONS):
            raise UnsupportedError(f"elements of a norm are {'gathered' if value.operator in READS else 'reduced'}")
        for argument, places in arguments_of(problem, value, at):
            visit(argument, places)

    visit(result, indices)
    return rows


def arguments_of(problem: GroupProblem, value: Value, indices: list):
    """(argument, its indices) for each argument of a value at `indices`; those gathered from are left out."""
    end = 0
    for argument in value.arguments:
        shape = problem.value(argument).shape
        if value.operator == "concat":
            axis = int(value.numbers[0])
            begin, end = end, end + shape[axis]
            yield argument, [*indices[:axis], indices[axis] - begin, *indices[axis + 1 :]]
        elif value.operator in VIEWS:
            yield argument, of_view(value, indices, shape)
        elif value.operator in REDUCTIONS:
            yield argument, of_reduction(value, indices, shape, [tirx.IntImm("int32", 0)] * len(value.numbers))
        elif value.operator == "rows":
            if argument == value.arguments[1]:
                axis = int(value.numbers[0])
                yield argument, indices[axis : axis + len(shape)]
        elif value.operator != "gather" or argument == value.arguments[1]:
            yield argument, broadcast(indices, shape)


def reads_of(
    problem: GroupProblem, values: list[tuple[int, list]], symbols: Symbols
) -> Iterator[tuple[int, list, Any]]:
    """(number of a source, indices, position) of each place that values, as (number, indices), are computed from."""
    pending = list(values)
    seen: set[tuple] = set()
    while pending:
        number, at = pending.pop()
        if (key := (number, *map(str, at))) in seen:
            continue
        seen.add(key)
        value = problem.value(number)
        if isinstance(value, Value):
            pending += arguments_of(problem, value, at)
        else:
            yield number, at, symbols.analyzer.simplify(flatten(symbols.simplified(at), value.shape))
