"""Two matrix products one after the other."""

from tvm import te

from tir_kernels.fusion.problem import MlpProblem
from tir_kernels.problems import gemm
from tir_kernels.problems.fusion_compute import operand_tensors, output_tensors, product_tensors
from tir_kernels.problems.kind import Random, titled

PROBLEM, PARTS = MlpProblem, gemm.PARTS


def sizes(problem: MlpProblem) -> dict[str, int]:
    """Rows, columns, and the depths of both products."""
    return {"m": problem.m, "n": problem.n, "inner": problem.first.n, "k": problem.first.k}


def title(problem: MlpProblem) -> str:
    """As "mlp 128x768x3072x768"."""
    return titled("mlp", sizes(problem))


def tensors(problem: MlpProblem) -> list[te.Tensor]:
    """a, w and the operands of the first product, w and the operands of the second, its outputs."""
    a = te.placeholder((problem.m, problem.first.k), problem.dtype, name="a")
    found, inner = [a], a
    for one, name in ((problem.first, "inner"), (problem.second, "out")):
        w, source = product_tensors(one, inner)
        operands = operand_tensors(one)
        inner, *others = output_tensors(one, source, operands, name)
        found += [w, *operands]
    return [*found, inner, *others]


def draw(problem: MlpProblem, random: Random) -> list:
    """The inputs that `gemm.draw` gives for the two products."""
    first, second = (gemm.draw(product, random) for product in (problem.first, problem.second))
    return [*first, *second[1:]]


def reference(problem: MlpProblem, inputs: list, torch, keep: None = None) -> list:
    """The outputs of the second product."""
    count = len(problem.first.inputs)
    return gemm.reference(problem.second, gemm.reference(problem.first, inputs[:count], torch) + inputs[count:], torch)
