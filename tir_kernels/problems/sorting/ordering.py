"""What the two kinds of sorting share: their definition as tensor expressions, and in PyTorch."""

from collections.abc import Callable

from tvm import te, tirx

from tir_kernels.fusion.sorting.problem import KEYS, MergeProblem, SortProblem
from tir_kernels.problems.fusion_compute import as_float

Ordering = SortProblem | MergeProblem


def sizes(problem: Ordering) -> dict[str, int]:
    """Rows, elements of a row, of a run, and those of a run that are kept."""
    return {"rows": problem.rows, "n": problem.n, "run": problem.out_run, "keep": problem.keep}


def comes_before(problem: Ordering, other, mine, is_earlier):
    """Whether an element comes before another one, after it in the row unless `is_earlier`."""
    if "float" not in problem.dtype:
        other, mine = (x.astype(KEYS[problem.dtype]) for x in (other, mine))
        less = other > mine if problem.descending else other < mine
        return tirx.any(less, tirx.all(is_earlier, other == mine))
    other, mine = (x if problem.dtype == "float64" else as_float(x) for x in (other, mine))
    missing = tirx.isnan(other), tirx.isnan(mine)
    if problem.descending:
        less = tirx.any(tirx.all(missing[0], tirx.Not(missing[1])), tirx.all(tirx.Not(missing[0]), other > mine))
    else:
        less = tirx.any(tirx.all(missing[1], tirx.Not(missing[0])), tirx.all(tirx.Not(missing[1]), other < mine))
    return tirx.any(less, tirx.all(is_earlier, tirx.any(other == mine, tirx.all(*missing))))


def sorted_tensors(problem: Ordering, x: te.Tensor, position: Callable) -> list[te.Tensor]:
    """Values, order, and ranks of the elements x, where `position(row, i)` is what order holds of element i.

    An element's rank is counted, and each place searched for the element whose rank it is.
    """
    run, n = problem.out_run, problem.n
    j, e = (te.reduce_axis((0, run), name=name) for name in "je")

    def counted(row, i):
        other = i // run * run + j
        inside = tirx.min(other, n - 1)
        is_before = comes_before(problem, x(row, inside), x(row, i), other < i)
        return te.sum(tirx.Select(tirx.all(other < n, is_before), 1, 0), axis=j)

    rank = te.compute((problem.rows, n), counted, name="rank")

    def source(row, at):
        element = at // problem.keep * run + e
        inside = tirx.min(element, n - 1)
        is_it = tirx.all(element < n, rank[row, inside] == at % problem.keep)
        return te.sum(tirx.Select(is_it, inside, 0), axis=e)

    shape = (problem.rows, problem.kept)
    places = te.compute(shape, source, name="places")
    values = te.compute(shape, lambda row, at: x[row, places[row, at]], name="out")
    kind = problem.order_dtype
    order = te.compute(shape, lambda row, at: position(row, places[row, at]).astype(kind), name="order")
    if not problem.ranks:
        return [values, order]
    return [values, order, _ranks(problem, order)]


def _ranks(problem: Ordering, order: te.Tensor) -> te.Tensor:
    """The inverse of an order of whole rows."""
    at = te.reduce_axis((0, problem.n), name="at")
    kind = problem.order_dtype
    place = lambda row, i: te.sum(
        tirx.Select(order[row, at] == i.astype(kind), at.astype(kind), tirx.const(0, kind)), axis=at
    )
    return te.compute((problem.rows, problem.n), place, name="ranks")


def reference(problem: Ordering, x, position, torch) -> list:
    """The outputs in PyTorch, for elements x whose positions are `position`, both (rows, n)."""
    values, order = [], []
    for part, place in zip(x.split(problem.out_run, 1), position.split(problem.out_run, 1)):
        found = part.sort(dim=1, descending=problem.descending, stable=True)
        values.append(found.values[:, : problem.keep])
        order.append(place.gather(1, found.indices)[:, : problem.keep])
    outputs = [torch.cat(values, 1), torch.cat(order, 1).to(getattr(torch, problem.order_dtype))]
    if problem.ranks:
        outputs.append(outputs[1].long().argsort(dim=1).to(outputs[1].dtype))
    return outputs
