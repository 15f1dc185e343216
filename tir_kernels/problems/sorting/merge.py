"""Sorted runs merged to longer ones."""

from tvm import te

from tir_kernels.fusion.sorting.problem import MergeProblem
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.sorting import ordering, sort
from tir_kernels.problems.sorting.ordering import sizes

__all__ = ["PARTS", "PROBLEM", "draw", "reference", "sizes", "tensors", "title"]

PROBLEM, PARTS = MergeProblem, ()


def title(problem: MergeProblem) -> str:
    """As "merge 1x32768x32768x32768"."""
    return titled("merge", sizes(problem), *["descending"] * problem.descending)


def tensors(problem: MergeProblem) -> list[te.Tensor]:
    """values and order, then those of the merged runs, and ranks where they are wanted."""
    shape = problem.rows, problem.n
    values, order = (te.placeholder(shape, kind, name=f"x{i}") for i, (_, kind) in enumerate(problem.inputs))
    return [values, order, *ordering.sorted_tensors(problem, values, lambda row, i: order[row, i])]


def draw(problem: MergeProblem, random: Random) -> list:
    """Runs of random elements, sorted, and their positions."""
    (values,) = sort.draw(problem, random)
    order = (random.integers(1, values.shape, "int64") + 1).cumsum(1) - 1
    for first in range(0, problem.n, problem.run):
        columns = slice(first, first + problem.run)
        found = values[:, columns].sort(dim=1, descending=problem.descending, stable=True)
        values[:, columns] = found.values
        order[:, columns] = order[:, columns].gather(1, found.indices)
    return [values, random.cast(order, "int32")]


def reference(problem: MergeProblem, inputs: list, torch, keep: None = None) -> list:
    """[values, order] or [values, order, ranks]."""
    return ordering.reference(problem, inputs[0], inputs[1].long(), torch)
