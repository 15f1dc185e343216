"""A grouped product: sorted rows, each group of which has a weight of its own."""

from tvm import te, tirx

from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.problems.fusion_compute import as_float, constant
from tir_kernels.problems.kind import Random, titled

PROBLEM, PARTS = GroupedProblem, ()


def sizes(problem: GroupedProblem) -> dict[str, int]:
    """Groups, rows of all of them, columns and depth."""
    return {"groups": problem.groups, "m": problem.m, "n": problem.n, "k": problem.k}


def title(problem: GroupedProblem) -> str:
    """As "grouped 8x128x3072x768"."""
    return titled("grouped", sizes(problem))


def tensors(problem: GroupedProblem) -> list[te.Tensor]:
    """a, w, offsets, out: a row's group is the number of offsets that it has passed."""
    index = "int64" if problem.is_large else "int32"
    lengths = lambda shape: [tirx.IntImm(index, n) for n in shape]
    (a, w, offsets) = (
        te.placeholder(lengths(shape), dtype, name=name)
        for name, (shape, dtype) in zip(("a", "w", "offsets"), problem.inputs, strict=True)
    )
    e, k = (te.reduce_axis((0, n), name=name) for name, n in zip("ek", lengths((problem.groups, problem.k))))
    passed = lambda i: te.sum(tirx.Select(offsets[e] <= i.astype(problem.offsets_dtype), 1, 0), axis=e)
    group = te.compute(lengths((problem.m,)), passed, name="group")

    def element(i, j):
        matrix = tirx.min(group[i], problem.groups - 1).astype(index)
        weight = w[matrix, j, k] if problem.w_layout == "nk" else w[matrix, k, j]
        value = as_float(a[i, k]) * as_float(weight)
        return te.sum(tirx.Select(group[i] < problem.groups, value, constant(0)), axis=k)

    shape = lengths((problem.m, problem.n))
    if problem.dtype == "float32":
        return [a, w, offsets, te.compute(shape, element, name="out")]
    product = te.compute(shape, element, name="product")
    return [a, w, offsets, te.compute(shape, lambda i, j: product[i, j].astype(problem.dtype), name="out")]


def draw(problem: GroupedProblem, random: Random) -> list:
    """Normal, the weights scaled so that elements of the product are about one; groups of nearly equal size."""
    a = random.normal((problem.m, problem.k), problem.dtype)
    w = random.normal(problem.w_shape, problem.dtype) * problem.k**-0.5
    number = (random.integers(1, (problem.groups,), "int64") + 1).cumsum(0)
    return [a, w, random.cast(number * problem.m // problem.groups, problem.offsets_dtype)]


def reference(problem: GroupedProblem, inputs: list, torch, keep: None = None) -> list:
    """[out]."""
    a, w, offsets = inputs
    out, start = torch.zeros((problem.m, problem.n), dtype=a.dtype, device=a.device), 0
    for group, end in enumerate(offsets.tolist()):
        out[start:end] = a[start:end] @ (w[group].T if problem.w_layout == "nk" else w[group])
        start = end
    return [out]
