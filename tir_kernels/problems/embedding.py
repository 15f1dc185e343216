"""Rows gathered from tables, their sum, and a norm of the sum."""

import math

from tvm import te, tirx

from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.problems.fusion_compute import as_float, constant, operand_tensors, output_tensors
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.steps_reference import after_source

PROBLEM, PARTS = EmbeddingProblem, (Table, Norm)


def sizes(problem: EmbeddingProblem) -> dict[str, int]:
    """Tokens and features."""
    return {"m": problem.m, "n": problem.n}


def title(problem: EmbeddingProblem) -> str:
    """As "embedding 128x768 layer_norm"."""
    return titled("embedding", sizes(problem), *([problem.norm.kind] if problem.norm else []))


def tensors(problem: EmbeddingProblem) -> list[te.Tensor]:
    """Indices and table of each table, the operands of the norm, out, [out_sum]."""
    inputs, source = _gather(problem)
    operands = operand_tensors(problem.of_sum)
    return [*inputs, *operands, *output_tensors(problem.of_sum, source, operands)]


def draw(problem: EmbeddingProblem, random: Random) -> list:
    """Indices inside their tables; the rest normal."""
    inputs = []
    for i, table in enumerate(problem.tables):
        inputs.append(random.integers(table.rows, problem.index_shape(i), problem.index_dtype))
        inputs.append(random.normal((table.rows, problem.n), problem.dtype))
    return [*inputs, *(random.normal(shape, problem.dtype) for shape in problem.of_sum.operand_shapes)]


def reference(problem: EmbeddingProblem, inputs: list, torch, keep: None = None) -> list:
    """[out] or [out, out_sum]."""
    count = 2 * len(problem.tables)
    pairs = zip(inputs[:count:2], inputs[1:count:2])
    gathered = [table[index.repeat(problem.m // len(index))] for index, table in pairs]
    return after_source(torch, problem.of_sum, sum(gathered[1:], gathered[0]), inputs[count:])


def _gather(problem: EmbeddingProblem):
    inputs = []
    for i, table in enumerate(problem.tables):
        inputs.append(te.placeholder(problem.index_shape(i), problem.index_dtype, name=f"index{i}"))
        inputs.append(te.placeholder((table.rows, problem.n), problem.dtype, name=f"table{i}"))
    pairs = list(zip(problem.tables, inputs[::2], inputs[1::2]))

    def row_of(table, index, rows, i, j):
        chosen = index[i % (table.period or problem.m)]
        inside = tirx.all(chosen >= 0, chosen < table.rows)
        value = as_float(rows[tirx.max(tirx.min(chosen, table.rows - 1), 0), j])
        return tirx.Select(inside, value, constant(math.nan))

    def gathered(i, j):
        return sum(row_of(*pair, i, j) for pair in pairs)

    return inputs, gathered
