"""Matrix product, steps and LayerNorm or RMSNorm in one CUDA kernel (sm_80 and up), for rows of up to 3072 columns.

It works in two phases, as no CTA holds a whole row.  Tiles go to memory in half precision before the norm.  The last
CTA to finish a tile of some rows reads these rows back from the L2 cache and normalises them; the result does not
depend on which CTA that is.

It is faster only if the launch of a second kernel costs more than the wait for the last rows.  In CUDA graphs on an
H200 that held for one of 20 problems (by 5 %), so only a search may choose it.
"""

import tvm

from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.gemm.kernel import MAX_OPERANDS, gemm_kernel, gemm_workspace
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import by_time, legal_configs
from tir_kernels.fusion.gemm.sizes.cost import predict_gemm_us
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, refusal
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.template import Operands

NAME = "gemm-norm"
TARGET_KIND = "cuda"
Config = GemmConfig
IS_PROPOSED = False  # the analytical model never proposes it
MAX_COLUMNS = 3072  # a warp holds a row in registers


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GemmProblem):
        return "it is not one matrix product"
    if problem.norm is None:
        return "it has no norm: the gemm kernel needs no second phase"
    if problem.defers_norm:
        return "the kernel neither reads nor writes statistics of rows"
    if len(problem.operand_shapes) > MAX_OPERANDS:
        return f"{len(problem.operand_shapes)} operands of steps and norm, more than {MAX_OPERANDS}"
    if problem.n > MAX_COLUMNS:
        return f"n={problem.n} is more than {MAX_COLUMNS}, the widest row that a warp normalises"
    if refusal(problem) is None and not legal_configs(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return refusal(problem)


def configs(problem: GemmProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory: first the measured ones, sorted by predicted time."""
    return by_time(legal_configs(problem, target), lambda config: predict_us(problem, config, target))


def predict_us(problem: GemmProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    return predict_gemm_us(problem, config, gpu_of(target))


def operands(problem: GemmProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """A workspace of arrival counters, and of partial sums if k is split."""
    return Operands(workspace=tuple(gemm_workspace(GemmGeometry(problem, config))))


def instantiate(problem: GemmProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, the steps' operands, the norm's, the workspace, out, and out_sum where it is kept."""
    return gemm_kernel(problem, config, "gemm_norm")
