"""The division of a group's results into domains: results that one loop over elements computes together.

A domain's elements are walked in the order of its results' axes, the last ones innermost.  Where a norm is among what
the results are computed from, a row of the norm is a row of the domain: `row_axes` axes at the end of the order, which
a group of threads holds together.
"""

import math
from dataclasses import dataclass

from tvm import tirx

from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.indices import broadcast, of_view
from tir_kernels.fusion.group.problem import NORMS, VIEWS, GroupProblem, Tensor
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
        shape = problem.value(result).shape
        groups.setdefault((shape, norms[result]), []).append(result)
    for (shape, found), results in list(groups.items()):
        # What a norm reads and the model goes on with is computed beside the norm.
        for (other, norm), more in groups.items():
            if not found and norm and other == shape and all(_reads(problem, more[0], result) for result in results):
                more += results
                del groups[shape, found]
                break
    return [_domain(problem, shape, sorted(norm), tuple(results)) for (shape, norm), results in groups.items()]


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


def _reads(problem: GroupProblem, number: int, argument: int) -> bool:
    """Whether a value is computed from another one, elementwise all the way."""
    value = problem.value(number)
    if isinstance(value, Tensor) or problem.value(argument).shape != value.shape:
        return False
    return any(a == argument or _reads(problem, a, argument) for a in value.arguments)


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
        for row_axes in (1, 2):
            domain = Domain(results, shape, order, norm, row_axes)
            if row_axes <= rank and domain.n == n and n % VECTOR == 0 and shape[-1] % VECTOR == 0:
                if all(_holds_rows(problem, domain, result) for result in results):
                    return domain
    raise UnsupportedError(f"rows of {n} of {problem.value(norm).operator} are no rows of a result {shape}")


def _holds_rows(problem: GroupProblem, domain: Domain, result: int) -> bool:
    """Whether each row of the domain reads one row of the norm, at the same columns or others."""
    symbols = Symbols()
    vector = symbols.new("vector", domain.n // VECTOR)
    _, indices = domain.places(symbols, vector)
    rows: list[list] = []
    _visit(problem, result, indices, domain.norm, symbols, rows)
    return all(
        not depends(index, vector) and not depends(index, symbols.lane) for row in rows for index in row
    ) and all(str(row) == str(rows[0]) for row in rows)


def norm_indices(problem: GroupProblem, domain: Domain, symbols: Symbols, indices: list) -> list:
    """The indices of the norm's row that the result at `indices` reads; of some row where it reads a pad's filling."""
    rows: list[list] = []
    _visit(problem, domain.results[0], indices, domain.norm, symbols, rows)
    return [
        index
        if symbols.is_known(index >= 0) and symbols.is_known(index < n)
        else tirx.Min(tirx.Max(index, tirx.IntImm("int32", 0)), tirx.IntImm("int32", n - 1))
        for index, n in zip(rows[0], problem.value(domain.norm).shape)
    ]


def _visit(problem: GroupProblem, number: int, indices: list, norm, symbols: Symbols, rows: list) -> None:
    """Collect the outer indices at which the norm is read for the value at `indices`."""
    value = problem.value(number)
    if isinstance(value, Tensor):
        return
    if number == norm:
        rows.append(symbols.simplified(indices[:-1]))
        return
    if norm not in _norms(problem, number):
        return
    if value.operator == "gather":
        raise UnsupportedError("elements of a norm are gathered")
    for place, argument in enumerate(value.arguments):
        shape = problem.value(argument).shape
        if value.operator == "concat":
            axis = int(value.numbers[0])
            begin = sum(problem.value(a).shape[axis] for a in value.arguments[:place])
            shifted = [*indices]
            shifted[axis] = indices[axis] - begin
            _visit(problem, argument, shifted, norm, symbols, rows)
        elif value.operator in VIEWS:
            _visit(problem, argument, of_view(value, indices, shape), norm, symbols, rows)
        else:
            _visit(problem, argument, broadcast(indices, shape), norm, symbols, rows)
