"""Rows sorted, run by run."""

from tvm import te

from tir_kernels.fusion.sorting.problem import SortProblem
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.sorting import ordering
from tir_kernels.problems.sorting.ordering import sizes

__all__ = ["PARTS", "PROBLEM", "draw", "reference", "sizes", "tensors", "title"]

PROBLEM, PARTS = SortProblem, ()


def title(problem: SortProblem) -> str:
    """As "sort 4096x64x64x8 descending"."""
    return titled("sort", sizes(problem), *["descending"] * problem.descending)


def tensors(problem: SortProblem) -> list[te.Tensor]:
    """x, then values, order, and ranks where they are wanted."""
    x = te.placeholder((problem.rows, problem.n), problem.dtype, name="x")
    return [x, *ordering.sorted_tensors(problem, x, lambda row, i: i)]


def draw(problem: ordering.Ordering, random: Random) -> list:
    """Normal floats; integers of which many are equal."""
    shape = problem.rows, problem.n
    if "float" in problem.dtype:
        return [random.normal(shape, problem.dtype)]
    return [random.cast(random.integers(2 if problem.dtype == "bool" else 64, shape, "int64"), problem.dtype)]


def reference(problem: SortProblem, inputs: list, torch, keep: None = None) -> list:
    """[values, order] or [values, order, ranks]."""
    (x,) = inputs
    position = torch.arange(problem.n, device=x.device).expand(x.shape)
    return ordering.reference(problem, x, position, torch)
