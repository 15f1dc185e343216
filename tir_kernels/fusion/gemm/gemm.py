"""Matrix product with an epilogue on CUDA (sm_80 and up): mma.sync, or wgmma of 16-bit elements on sm_90a.

Tiles come by multi-stage cp.async (`gemm/kernel.py` says how), on sm_90a also by the tensor memory accelerator
(`gemm/tma.py`, and `gemm/cluster.py` where k is split).
"""

import tvm

from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.gemm.cluster import cluster_kernel
from tir_kernels.fusion.gemm.kernel import MAX_OPERANDS, gemm_kernel, gemm_workspace
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import by_time, legal_configs
from tir_kernels.fusion.gemm.sizes.cost import predict_gemm_us
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, refusal
from tir_kernels.fusion.gemm.tma import tma_kernel
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.template import Operands

NAME = "gemm"
TARGET_KIND = "cuda"
DEFERS_NORMS = True  # norms before and after a product may be deferred to it (`problem.py`)
Config = GemmConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GemmProblem):
        return "it is not one matrix product"
    if problem.norm is not None:
        return f"{problem.norm.kind} needs whole rows, a tile has parts of them"
    if len(problem.operand_shapes) > MAX_OPERANDS:
        return f"{len(problem.operand_shapes)} operands of steps, more than {MAX_OPERANDS}"
    if problem.dtype == "float32" and problem.defers_norm:
        return "deferred norms are computed in float16 or bfloat16, not in float32"
    if refusal(problem, takes_float32=True) is None and not legal_configs(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return refusal(problem, takes_float32=True)


def configs(problem: GemmProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory: first the measured ones, sorted by predicted time."""
    found = legal_configs(problem, target)
    return by_time(found, lambda config: predict_us(problem, config, target), measured=problem.dtype != "float32")


def predict_us(problem: GemmProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    return predict_gemm_us(problem, config, gpu_of(target))


def operands(problem: GemmProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """A workspace of partial sums and arrival counters if k is split, but not among a cluster; else empty."""
    return Operands(workspace=tuple(gemm_workspace(GemmGeometry(problem, config))))


def instantiate(problem: GemmProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, the steps' operands, the workspace, out."""
    if config.tma and config.splits > 1:
        return cluster_kernel(problem, config, "gemm")
    if config.tma:
        return tma_kernel(problem, config, "gemm", gpu_of(target))
    return gemm_kernel(problem, config, "gemm")
