"""An elementwise chain and a norm on a matrix."""

from tvm import te

from tir_kernels.fusion.problem import Norm, RowProblem, Step
from tir_kernels.tuning.fusion_compute import as_float, operand_tensors, output_tensors

PROBLEM, PARTS = RowProblem, (Step, Norm)


def tensors(problem: RowProblem) -> list[te.Tensor]:
    """x, the operands of the steps and of the norm, out, [out_sum]."""
    x = te.placeholder((problem.m, problem.n), problem.dtype, name="x")
    operands = operand_tensors(problem)
    return [x, *operands, *output_tensors(problem, lambda i, j: as_float(x[i, j]), operands)]


def draw(problem: RowProblem, generator, device) -> list:
    """All normal."""
    from tir_kernels.problems.pytorch import normal

    operands = [normal(shape, problem.dtype, generator, device) for shape in problem.operand_shapes]
    return [normal((problem.m, problem.n), problem.dtype, generator, device), *operands]


def reference(problem: RowProblem, inputs: list, keep: None = None) -> list:
    """[out] or [out, out_sum]."""
    from tir_kernels.problems.pytorch import after_source

    return after_source(problem, inputs[0], inputs[1:])
