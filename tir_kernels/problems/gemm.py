"""A matrix product, then an elementwise chain and a norm."""

from tvm import te

from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.problems.fusion_compute import operand_tensors, output_tensors, product_tensors
from tir_kernels.problems.kind import Random, titled
from tir_kernels.problems.steps_reference import after_source, gated

PROBLEM, PARTS = GemmProblem, (Step, Norm)


def sizes(problem: GemmProblem) -> dict[str, int]:
    """Rows, columns and depth of the product, or of each of a batch."""
    one = {"m": problem.rows, "n": problem.n, "k": problem.k}
    return one if problem.batch == 1 else {"batch": problem.batch, **one}


def title(problem: GemmProblem) -> str:
    """As "gemm 128x3072x768 add gelu"."""
    norm = [problem.norm.kind] if problem.norm else []
    gate = [] if problem.gate is None else [f"{problem.gate} gate"]
    return titled("gemm", sizes(problem), *gate, *(step.kind for step in problem.steps), *norm)


def tensors(problem: GemmProblem) -> list[te.Tensor]:
    """a, w, the operands of the steps and of the norm, out, [out_sum or statistics]."""
    a = te.placeholder((problem.m, problem.k), problem.dtype, name="a")
    w, source = product_tensors(problem, a)
    operands = operand_tensors(problem)
    return [a, w, *operands, *output_tensors(problem, source, operands)]


def draw(problem: GemmProblem, random: Random) -> list:
    """All normal, the weights scaled so that elements of the product are about one."""
    operands = [random.normal(shape, problem.dtype) for shape in problem.operand_shapes]
    a = random.normal((problem.m, problem.k), problem.dtype)
    return [a, random.normal(problem.w_shape, problem.dtype) * problem.k**-0.5, *operands]


def reference(problem: GemmProblem, inputs: list, torch, keep: None = None) -> list:
    """[out] or [out, out_sum], for problems without deferred norms."""
    a, w, *operands = inputs
    if problem.batch == 1:
        product = a @ (w.T if problem.w_layout == "nk" else w)
    else:
        w = w.view(problem.matrices, -1, w.shape[-1])
        w = w.mT if problem.w_layout == "nk" else w
        product = (a.view(-1, problem.matrices, problem.rows, problem.k) @ w).view(problem.m, problem.n)
    if problem.gate is not None:
        product = product + operands.pop(0) if problem.gate_bias else product
        product = gated(torch, problem.gate, product)
    return after_source(torch, problem, product, operands)
