"""The definitions of the fusion problems as tensor expressions, by which MetaSchedule identifies a workload."""

import math

from tvm import te, tirx

from tir_kernels.fusion.problem import (
    STATISTICS_COLUMNS,
    GemmProblem,
    MlpProblem,
    Norm,
    RowProblem,
    Step,
    statistics_of,
)
from tir_kernels.fusion.rows.embedding import EmbeddingProblem
from tir_kernels.fusion.rows.rotary import RotaryProblem


def fusion_tensors(problem) -> list[te.Tensor]:
    """Inputs and outputs of a problem of the fusion templates, in its order of arguments.

    The first output's block is called "out".
    """
    if isinstance(problem, RotaryProblem):
        return _rotary(problem)
    if isinstance(problem, MlpProblem):
        return _two_products(problem)
    if isinstance(problem, EmbeddingProblem):
        inputs, source = _gather(problem)
        problem = problem.of_sum
    elif isinstance(problem, GemmProblem):
        a = te.placeholder((problem.m, problem.k), problem.dtype, name="a")
        inputs, source = _product(problem, a)
    else:
        x = te.placeholder((problem.m, problem.n), problem.dtype, name="x")
        inputs, source = [x], lambda i, j: _float(x[i, j])
    operands = _operands(problem)
    return [*inputs, *operands, *_outputs(problem, source, operands)]


def _operands(problem: RowProblem) -> list[te.Tensor]:
    return [te.placeholder(shape, dtype, name=f"operand{i}") for i, (shape, dtype) in enumerate(problem.operands)]


def _two_products(problem: MlpProblem) -> list[te.Tensor]:
    a = te.placeholder((problem.m, problem.first.k), problem.dtype, name="a")
    tensors, inner = [a], a
    for one, name in ((problem.first, "inner"), (problem.second, "out")):
        (_, w), source = _product(one, inner)
        operands = _operands(one)
        inner, *others = _outputs(one, source, operands, name)
        tensors += [w, *operands]
    return [*tensors, inner, *others]


def _product(problem: GemmProblem, a: te.Tensor):
    w = te.placeholder(problem.w_shape, problem.dtype, name="w")
    k = te.reduce_axis((0, problem.k), name="k")
    weight = (lambda j: w[j, k]) if problem.w_layout == "nk" else (lambda j: w[k, j])
    shape = problem.m, problem.n
    product = te.compute(shape, lambda i, j: te.sum(_float(a[i, k]) * _float(weight(j)), axis=k), name="product")
    return [a, w], lambda i, j: product[i, j]


def _gather(problem: EmbeddingProblem):
    inputs = []
    for i, table in enumerate(problem.tables):
        inputs.append(te.placeholder(problem.index_shape(i), problem.index_dtype, name=f"index{i}"))
        inputs.append(te.placeholder((table.rows, problem.n), problem.dtype, name=f"table{i}"))
    pairs = list(zip(problem.tables, inputs[::2], inputs[1::2]))

    def row_of(table, index, rows, i, j):
        chosen = index[i % (table.period or problem.m)]
        inside = tirx.all(chosen >= 0, chosen < table.rows)
        value = _float(rows[tirx.max(tirx.min(chosen, table.rows - 1), 0), j])
        return tirx.Select(inside, value, _const(math.nan))

    def gathered(i, j):
        return sum(row_of(*pair, i, j) for pair in pairs)

    return inputs, gathered


def _outputs(problem: RowProblem, source, operands: list[te.Tensor], name: str = "out") -> list[te.Tensor]:
    """out, called `name`, and out_sum where it is kept, of what `source(i, j)` gives in float32."""
    remaining, shape = iter(operands), (problem.m, problem.n)
    if getattr(problem, "a_norm", None) is not None:
        source = _of_normed(problem, source, remaining)
    for step in problem.steps:
        operand = next(remaining) if step.operand is not None else None
        source = _stepped(step, source, operand if step.norm is None else _normed(step.norm, operand, remaining))
    if problem.norm is None:
        out = te.compute(shape, lambda i, j: source(i, j).astype(problem.dtype), name=name)
        return [out, _statistics(out)] if getattr(problem, "statistics", False) else [out]
    x = te.compute(shape, source, name="x_sum")
    weight = next(remaining) if problem.norm.weight else None
    bias = next(remaining) if problem.norm.bias else None
    centered = x
    if problem.norm.kind == "layer_norm":
        mean = _row_sum(x, lambda value: value, "mean")
        centered = te.compute(shape, lambda i, j: x[i, j] - mean[i] / problem.n, name="centered")
    square = _row_sum(centered, lambda value: value * value, "square")

    def normalized(i, j):
        value = centered[i, j] * tirx.rsqrt(square[i] / problem.n + tirx.const(problem.norm.eps, "float32"))
        value = value if weight is None else value * _float(weight[j])
        value = value if bias is None else value + _float(bias[j])
        return value.astype(problem.dtype)

    outputs = [te.compute(shape, normalized, name=name)]
    if problem.keeps_sum:
        outputs.append(te.compute(shape, lambda i, j: x[i, j].astype(problem.dtype), name="out_sum"))
    return outputs


def _of_normed(problem: GemmProblem, source, remaining):
    """The product with norm(a) from that with a."""
    mean, scale = _mean_and_scale(problem.a_norm, next(remaining))
    if problem.a_norm.kind == "rms_norm":
        return lambda i, j: source(i, j) * scale(i)
    columns = next(remaining)
    return lambda i, j: (source(i, j) - mean(i) * columns[0, j]) * scale(i) + columns[1, j]


def _normed(norm: Norm, x: te.Tensor, remaining) -> te.Tensor:
    """norm(x) from x and the operands that follow it."""
    mean, scale = _mean_and_scale(norm, next(remaining))
    columns = next(remaining)
    element = lambda i, j: (_float(x[i, j]) - mean(i)) * scale(i) * columns[0, j] + columns[1, j]
    return te.compute(x.shape, element, name="normed")


def _mean_and_scale(norm: Norm, statistics: te.Tensor):
    """The value that the norm subtracts from a row and the factor that it then applies, as functions of the row."""
    m, parts = (int(size) for size in statistics.shape[:2])
    number = _const(parts * STATISTICS_COLUMNS)
    total = _row_sum(te.compute((m, parts), lambda i, p: statistics[i, p, 0], name="means"), lambda x: x, "mean")
    mean = (lambda i: total[i] / _const(parts)) if norm.kind == "layer_norm" else lambda i: _const(0)

    def deviations(i, p):
        away = statistics[i, p, 0] - mean(i)
        return statistics[i, p, 1] + _const(STATISTICS_COLUMNS) * away * away

    square = _row_sum(te.compute((m, parts), deviations, name="deviations"), lambda x: x, "square")
    return mean, lambda i: tirx.rsqrt(square[i] / number + _const(norm.eps))


def _statistics(x: te.Tensor) -> te.Tensor:
    """The statistics of the rows of x."""
    (shape, dtype), width = statistics_of(int(x.shape[0]), int(x.shape[1])), STATISTICS_COLUMNS
    one, two = te.reduce_axis((0, width), name="c"), te.reduce_axis((0, width), name="c")
    sums = te.compute(shape[:2], lambda i, p: te.sum(_float(x[i, p * width + one]), axis=one), name="sums")

    def squared(i, p):
        away = _float(x[i, p * width + two]) - sums[i, p] / _const(width)
        return te.sum(away * away, axis=two)

    squares = te.compute(shape[:2], squared, name="squares")
    value = lambda i, p, c: tirx.Select(c == 0, sums[i, p] / _const(width), squares[i, p])
    return te.compute(shape, lambda i, p, c: value(i, p, c).astype(dtype), name="statistics")


def _row_sum(x: te.Tensor, function, name: str) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[1]), name="k")
    return te.compute((x.shape[0],), lambda i: te.sum(function(x[i, k]), axis=k), name=name)


def _stepped(step: Step, source, operand: te.Tensor | None):
    if operand is not None:
        is_row = step.operand == "row"
        other = (lambda i, j: _float(operand[j])) if is_row else (lambda i, j: _float(operand[i, j]))
        if step.kind == "add":
            return lambda i, j: source(i, j) + other(i, j)
        return lambda i, j: source(i, j) * other(i, j)
    if step.kind == "scale":
        return lambda i, j: source(i, j) * _const(step.value)
    if step.kind == "clip":
        return lambda i, j: tirx.max(tirx.min(source(i, j), _const(step.value)), _const(-step.value))
    return lambda i, j: ACTIVATIONS[step.kind](source(i, j))


def _gelu(x):
    return x * (tirx.erf(x * _const(math.sqrt(0.5))) + _const(1)) * _const(0.5)


def _gelu_tanh(x):
    inner = (x + x * x * x * _const(0.044715)) * _const(math.sqrt(2 / math.pi))
    return x * (tirx.tanh(inner) + _const(1)) * _const(0.5)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: tirx.max(x, _const(0)),
    "silu": lambda x: x * tirx.sigmoid(x),
    "tanh": tirx.tanh,
    "sigmoid": tirx.sigmoid,
}


def _rotary(problem: RotaryProblem) -> list[te.Tensor]:
    sources = [te.placeholder(shape, problem.dtype, name=f"x{i}") for i, shape in enumerate(problem.source_shapes)]
    tables = [te.placeholder(problem.table_shape, problem.table_dtype, name=name) for name in ("cos", "sin")]
    is_packed = problem.packed_heads is not None
    parts = [(sources[0], 0), (sources[0], problem.heads) if is_packed else (sources[1], 0)]
    outputs = [
        te.compute(shape, _turned(problem, *part, tables), name=name)
        for part, shape, name in zip(parts, problem.out_shapes, ("out", "k_out"))
    ]
    return [*sources, *tables, *outputs]


def _turned(problem: RotaryProblem, x: te.Tensor, first_head: int, tables: list[te.Tensor]):
    """The element of q_out or k_out at an index, from the heads of x that begin with `first_head`."""
    half = problem.head_dim // 2

    def element(*index):
        b, s, h, d = index if problem.out_layout == "bshd" else (index[0], index[2], index[1], index[3])
        cos, sin = (_float(table[b if problem.table_batch > 1 else 0, s, d]) for table in tables)
        other = _float(x[b, s, first_head + h, (d + half) % problem.head_dim])
        signed = tirx.Select(d < half, -other, other)
        return (_float(x[b, s, first_head + h, d]) * cos + signed * sin).astype(problem.dtype)

    return element


def _float(value):
    return value.astype("float32")


def _const(value: float):
    return tirx.const(value, "float32")
