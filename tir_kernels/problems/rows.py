"""An elementwise chain and a norm on a matrix."""

from tvm import te

from tir_kernels.fusion.problem import Norm, RowProblem, Step
from tir_kernels.problems.fusion_compute import as_float, operand_tensors, output_tensors
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.steps_reference import after_source

PROBLEM, PARTS = RowProblem, (Step, Norm)


def sizes(problem: RowProblem) -> dict[str, int]:
    """Rows and columns."""
    return {"m": problem.m, "n": problem.n}


def title(problem: RowProblem) -> str:
    """As "row 128x768 add layer_norm"."""
    norm = [problem.norm.kind] if problem.norm else []
    return titled("row", sizes(problem), *(step.kind for step in problem.steps), *norm)


def tensors(problem: RowProblem) -> list[te.Tensor]:
    """x, the operands of the steps and of the norm, out, [out_sum]."""
    x = te.placeholder((problem.m, problem.n), problem.dtype, name="x")
    operands = operand_tensors(problem)
    return [x, *operands, *output_tensors(problem, lambda i, j: as_float(x[i, j]), operands)]


def draw(problem: RowProblem, random: Random) -> list:
    """All normal."""
    operands = [random.normal(shape, problem.dtype) for shape in problem.operand_shapes]
    return [random.normal((problem.m, problem.n), problem.dtype), *operands]


def reference(problem: RowProblem, inputs: list, torch, keep: None = None) -> list:
    """[out] or [out, out_sum]."""
    return after_source(torch, problem, inputs[0], inputs[1:])
