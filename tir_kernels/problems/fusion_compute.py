"""Tensor expressions that kinds of problems are defined by: a product, elementwise steps, norms of rows."""

import math
from collections.abc import Iterator

from tvm import te, tirx

from tir_kernels.fusion.problem import (
    GATE_COLUMNS,
    STATISTICS_COLUMNS,
    GemmProblem,
    Norm,
    RowProblem,
    Step,
    statistics_of,
)


def operand_tensors(problem: RowProblem) -> list[te.Tensor]:
    """The inputs after the source."""
    return [te.placeholder(shape, dtype, name=f"operand{i}") for i, (shape, dtype) in enumerate(problem.operands)]


def product_tensors(problem: GemmProblem, a: te.Tensor):
    """w, and the element (i, j) of a @ w in float32 as a function."""
    w = te.placeholder(problem.w_shape, problem.dtype, name="w")
    k = te.reduce_axis((0, problem.k), name="k")
    matrix = (lambda i: 0) if problem.matrices == 1 else (lambda i: i // problem.rows % problem.matrices)
    if problem.w_layout == "nk":
        weight = lambda i, j: w[matrix(i) * problem.w_columns + j, k]
    else:
        weight = lambda i, j: w[matrix(i) * problem.k + k, j]
    shape = problem.m, problem.w_columns
    product = te.compute(shape, lambda i, j: te.sum(as_float(a[i, k]) * as_float(weight(i, j)), axis=k), name="product")
    return w, lambda i, j: product[i, j]


def output_tensors(problem: RowProblem, source, operands: list[te.Tensor], name: str = "out") -> list[te.Tensor]:
    """[out], [out, out_sum] or [out, statistics] of a problem whose source has the float32 element `source(i, j)`.

    `out` is called `name`.
    """
    remaining, shape = iter(operands), (problem.m, problem.n)
    source, norm = stepped(problem, source, remaining), problem.norm
    if norm is None:
        out = te.compute(shape, lambda i, j: source(i, j).astype(problem.dtype), name=name)
        return [out, _statistics(out)] if getattr(problem, "statistics", False) else [out]
    x = te.compute(shape, source, name="x_sum")
    weight = next(remaining) if norm.weight else None
    bias = next(remaining) if norm.bias else None
    centered = x
    if norm.kind == "layer_norm":
        mean = _row_sum(x, lambda value: value, "mean")
        centered = te.compute(shape, lambda i, j: x[i, j] - mean[i] / problem.n, name="centered")
    square = _row_sum(centered, lambda value: value * value, "square")

    def normalized(i, j):
        value = centered[i, j] * tirx.rsqrt(square[i] / problem.n + tirx.const(norm.eps, "float32"))
        value = value if weight is None else value * as_float(weight[j])
        value = value if bias is None else value + as_float(bias[j])
        return value.astype(problem.dtype)

    outputs = [te.compute(shape, normalized, name=name)]
    if problem.keeps_sum:
        outputs.append(te.compute(shape, lambda i, j: x[i, j].astype(problem.dtype), name="out_sum"))
    return outputs


def stepped(problem: RowProblem, source, remaining: Iterator[te.Tensor]):
    """The float32 element after the gate, the norm of a and the steps; their operands are the next `remaining` ones."""
    if isinstance(problem, GemmProblem) and problem.gate is not None:
        source = _gated(problem.gate, source, next(remaining) if problem.gate_bias else None)
    if isinstance(problem, GemmProblem) and problem.a_norm is not None:
        source = _of_normed(problem.a_norm, source, remaining)
    for step in problem.steps:
        operand = next(remaining) if step.operand is not None else None
        source = _stepped(step, source, operand if step.norm is None else _normed(step.norm, operand, remaining))
    return source


def _gated(gate: str, source, bias: te.Tensor | None):
    """f(gate) * value of a product's columns, in which they alternate."""
    added = source if bias is None else lambda i, j: source(i, j) + as_float(bias[j])
    place = lambda j: j // GATE_COLUMNS * (2 * GATE_COLUMNS) + j % GATE_COLUMNS
    return lambda i, j: ACTIVATIONS[gate](added(i, place(j))) * added(i, place(j) + GATE_COLUMNS)


def _of_normed(a_norm: Norm, source, remaining):
    """The product with norm(a), computed from the product with a."""
    mean, scale = _mean_and_scale(a_norm, next(remaining))
    if a_norm.kind == "rms_norm":
        return lambda i, j: source(i, j) * scale(i)
    columns = next(remaining)
    return lambda i, j: (source(i, j) - mean(i) * columns[0, j]) * scale(i) + columns[1, j]


def _normed(norm: Norm, x: te.Tensor, remaining) -> te.Tensor:
    """norm(x) from x and the operands that follow it."""
    mean, scale = _mean_and_scale(norm, next(remaining))
    columns = next(remaining)
    element = lambda i, j: (as_float(x[i, j]) - mean(i)) * scale(i) * columns[0, j] + columns[1, j]
    return te.compute(x.shape, element, name="normed")


def _mean_and_scale(norm: Norm, statistics: te.Tensor):
    """The shift and the scale of a row's norm, as functions of the row's number."""
    m, parts = (int(size) for size in statistics.shape[:2])
    number = constant(parts * STATISTICS_COLUMNS)
    total = _row_sum(te.compute((m, parts), lambda i, p: statistics[i, p, 0], name="means"), lambda x: x, "mean")
    mean = (lambda i: total[i] / constant(parts)) if norm.kind == "layer_norm" else lambda i: constant(0)

    def deviations(i, p):
        away = statistics[i, p, 0] - mean(i)
        return statistics[i, p, 1] + constant(STATISTICS_COLUMNS) * away * away

    square = _row_sum(te.compute((m, parts), deviations, name="deviations"), lambda x: x, "square")
    return mean, lambda i: tirx.rsqrt(square[i] / number + constant(norm.eps))


def _statistics(x: te.Tensor) -> te.Tensor:
    """The statistics of the rows of x."""
    (shape, dtype), width = statistics_of(int(x.shape[0]), int(x.shape[1])), STATISTICS_COLUMNS
    one, two = te.reduce_axis((0, width), name="c"), te.reduce_axis((0, width), name="c")
    sums = te.compute(shape[:2], lambda i, p: te.sum(as_float(x[i, p * width + one]), axis=one), name="sums")

    def squared(i, p):
        away = as_float(x[i, p * width + two]) - sums[i, p] / constant(width)
        return te.sum(away * away, axis=two)

    squares = te.compute(shape[:2], squared, name="squares")
    value = lambda i, p, c: tirx.Select(c == 0, sums[i, p] / constant(width), squares[i, p])
    return te.compute(shape, lambda i, p, c: value(i, p, c).astype(dtype), name="statistics")


def _row_sum(x: te.Tensor, function, name: str) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[1]), name="k")
    return te.compute((x.shape[0],), lambda i: te.sum(function(x[i, k]), axis=k), name=name)


def _stepped(step: Step, source, operand: te.Tensor | None):
    if operand is not None:
        is_row = step.operand == "row"
        other = (lambda i, j: as_float(operand[j])) if is_row else (lambda i, j: as_float(operand[i, j]))
        if step.kind == "add":
            return lambda i, j: source(i, j) + other(i, j)
        return lambda i, j: source(i, j) * other(i, j)
    value = step.value
    if value is not None:
        if step.kind == "scale":
            return lambda i, j: source(i, j) * constant(value)
        return lambda i, j: tirx.max(tirx.min(source(i, j), constant(value)), constant(-value))
    return lambda i, j: ACTIVATIONS[step.kind](source(i, j))


def _gelu(x):
    return x * (tirx.erf(x * constant(math.sqrt(0.5))) + constant(1)) * constant(0.5)


def _gelu_tanh(x):
    inner = (x + x * x * x * constant(0.044715)) * constant(math.sqrt(2 / math.pi))
    return x * (tirx.tanh(inner) + constant(1)) * constant(0.5)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: tirx.max(x, constant(0)),
    "silu": lambda x: x * tirx.sigmoid(x),
    "tanh": tirx.tanh,
    "sigmoid": tirx.sigmoid,
}


def as_float(value):
    """An expression as float32."""
    return value.astype("float32")


def constant(value: float):
    """A number as float32."""
    return tirx.const(value, "float32")
