"""A grouped product: sorted rows, each group of which has a weight of its own; then a gate and elementwise steps."""

import math

from tvm import te, tirx

from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import Step
from tir_kernels.problems.fusion_compute import as_float, constant, stepped
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.steps_reference import after_source, gated

PROBLEM, PARTS = GroupedProblem, (Step,)


def sizes(problem: GroupedProblem) -> dict[str, int]:
    """Groups, rows of all of them, columns and depth."""
    return {"groups": problem.groups, "m": problem.m, "n": problem.n, "k": problem.k}


def title(problem: GroupedProblem) -> str:
    """As "grouped 8x128x3072x768 silu gate"."""
    gate = [] if problem.gate is None else [f"{problem.gate} gate"]
    return titled("grouped", sizes(problem), *gate, *(step.kind for step in problem.steps))


def tensors(problem: GroupedProblem) -> list[te.Tensor]:
    """a, w, offsets, [rows], out: a row's group is the number of offsets that it has passed."""
    index = "int64" if problem.is_large else "int32"
    lengths = lambda shape: [tirx.IntImm(index, n) for n in shape]
    names = ("a", "w", "offsets", "rows")
    (a, w, offsets, *rows) = (
        te.placeholder(lengths(shape), dtype, name=name) for name, (shape, dtype) in zip(names, problem.inputs)
    )
    e, k = (te.reduce_axis((0, n), name=name) for name, n in zip("ek", lengths((problem.groups, problem.k))))
    passed = lambda i: te.sum(tirx.Select(offsets[e] <= i.astype(problem.offsets_dtype), 1, 0), axis=e)
    group = te.compute(lengths((problem.m,)), passed, name="group")

    def element(i, j):
        matrix = tirx.min(group[i], problem.groups - 1).astype(index)
        weight = w[matrix, j, k] if problem.w_layout == "nk" else w[matrix, k, j]
        value = (as_float(a[i, k]) if not rows else _gathered(problem, a, rows[0][i], k)) * as_float(weight)
        return te.sum(tirx.Select(group[i] < problem.groups, value, constant(0)), axis=k)

    is_alone = problem.gate is None and not problem.steps
    if problem.dtype == "float32" and is_alone:
        return [a, w, offsets, *rows, te.compute(lengths((problem.m, problem.n)), element, name="out")]
    product = te.compute(lengths((problem.m, problem.w_columns)), element, name="product")
    result = stepped(problem.product(problem.m), lambda i, j: product[i, j], iter(()))
    rounded = lambda i, j: result(i, j).astype(problem.dtype)
    return [a, w, offsets, *rows, te.compute(lengths((problem.m, problem.n)), rounded, name="out")]


def _gathered(problem: GroupedProblem, a: te.Tensor, row, k):
    """Element k of a row of a, as float32; NaN if there is no such row."""
    exists = tirx.all(row >= 0, row < problem.a_rows)
    inside = tirx.max(tirx.min(row, problem.a_rows - 1), 0)
    return tirx.Select(exists, as_float(a[inside, k]), constant(math.nan))


def draw(problem: GroupedProblem, random: Random) -> list:
    """Normal, the weights scaled so that elements of the product are about one; groups of nearly equal size."""
    a = random.normal((problem.a_rows, problem.k), problem.dtype)
    w = random.normal(problem.w_shape, problem.dtype) * problem.k**-0.5
    number = (random.integers(1, (problem.groups,), "int64") + 1).cumsum(0)
    given = [a, w, random.cast(number * problem.m // problem.groups, problem.offsets_dtype)]
    if problem.gathered_from is None:
        return given
    return [*given, random.integers(problem.a_rows, (problem.m,), problem.rows_dtype)]


def reference(problem: GroupedProblem, inputs: list, torch, keep: None = None) -> list:
    """[out]."""
    a, w, offsets, *rows = inputs
    if rows:
        exists = (rows[0] >= 0) & (rows[0] < problem.a_rows)
        gathered = a[rows[0].clamp(0, problem.a_rows - 1).long()]
        a = torch.where(exists[:, None], gathered, torch.full_like(gathered[:1, :1], torch.nan))
    out, start = torch.zeros((problem.m, problem.w_columns), dtype=a.dtype, device=a.device), 0
    for group, end in enumerate(offsets.tolist()):
        out[start:end] = a[start:end] @ (w[group].T if problem.w_layout == "nk" else w[group])
        start = end
    out = out if problem.gate is None else gated(torch, problem.gate, out)
    return after_source(torch, problem.product(problem.m), out, [])
