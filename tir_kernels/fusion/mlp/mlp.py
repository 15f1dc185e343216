"""Two matrix products with steps in one CUDA kernel (sm_80 and up): mma.sync, for narrow first products.

Adapters, low-rank projections and small feed-forward networks have such products.  `mlp/kernel.py` explains the kernel,
`mlp/cost.py` predicts where it is faster than two.
"""

import tvm

from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.shared_tiles import CHUNK
from tir_kernels.fusion.gemm.sizes.geometry import refusal
from tir_kernels.fusion.mlp.configs import mlp_configs
from tir_kernels.fusion.mlp.cost import predict_mlp_us
from tir_kernels.fusion.mlp.geometry import MAX_INNER, MlpConfig
from tir_kernels.fusion.mlp.kernel import MAX_INNER_OPERANDS, MAX_OPERANDS, mlp_kernel
from tir_kernels.fusion.problem import MlpProblem
from tir_kernels.template import Operands

NAME = "mlp"
TARGET_KIND = "cuda"
Config = MlpConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, MlpProblem):
        return "it is not two matrix products"
    first, second = problem.first, problem.second
    if second.norm is not None:
        return f"{second.norm.kind} needs whole rows, a tile has parts of them"
    if first.n > MAX_INNER:
        return f"the first product has n={first.n} columns, more than {MAX_INNER}, of which a CTA holds whole rows"
    for product, most in ((first, MAX_INNER_OPERANDS), (second, MAX_OPERANDS)):
        if product.w_layout == "kn":
            return "w_layout='kn': the kernel reads weights along k"
        if len(product.operand_shapes) > most:
            return f"{len(product.operand_shapes)} operands of a product's steps, more than {most}"
        if product.n % CHUNK:
            return f"n={product.n} must be a multiple of {CHUNK}: rows are stored 16 bytes at a time"
        if reason := refusal(product):
            return reason
    if not mlp_configs(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return None


def configs(problem: MlpProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory, the fastest as predicted first."""
    return sorted(mlp_configs(problem, target), key=lambda config: predict_us(problem, config, target))


def predict_us(problem: MlpProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    return predict_mlp_us(problem, config, gpu_of(target))


def operands(problem: MlpProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: MlpProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w and the operands of the first product, w and the operands of the second, out."""
    return mlp_kernel(problem, config, "mlp")
