"""A matrix product, then an elementwise chain and a norm."""

from tvm import te

from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.tuning.fusion_compute import operand_tensors, output_tensors, product_tensors

PROBLEM, PARTS = GemmProblem, (Step, Norm)


def tensors(problem: GemmProblem) -> list[te.Tensor]:
    """a, w, the operands of the steps and of the norm, out, [out_sum or statistics]."""
    a = te.placeholder((problem.m, problem.k), problem.dtype, name="a")
    w, source = product_tensors(problem, a)
    operands = operand_tensors(problem)
    return [a, w, *operands, *output_tensors(problem, source, operands)]


def draw(problem: GemmProblem, generator, device) -> list:
    """All normal, the weights scaled so that elements of the product are about one."""
    from tir_kernels.problems.pytorch import normal

    operands = [normal(shape, problem.dtype, generator, device) for shape in problem.operand_shapes]
    a = normal((problem.m, problem.k), problem.dtype, generator, device)
    return [a, normal(problem.w_shape, problem.dtype, generator, device) * problem.k**-0.5, *operands]


def reference(problem: GemmProblem, inputs: list, keep: None = None) -> list:
    """[out] or [out, out_sum]; norms that are deferred are not known here."""
    from tir_kernels.problems.pytorch import after_source

    a, w, *operands = inputs
    return after_source(problem, a @ (w.T if problem.w_layout == "nk" else w), operands)
