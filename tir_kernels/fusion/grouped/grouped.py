"""Grouped product on CUDA (sm_80 and up): mma.sync, or wgmma on sm_90a, with copies by cp.async."""

from dataclasses import replace
from functools import lru_cache

import tvm

from tir_kernels.cuda.device import GPU, gpu_of
from tir_kernels.cuda.shared_tiles import CHUNK, ELEMENT_BYTES
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED, legal_configs
from tir_kernels.fusion.gemm.sizes.cost import predict_gemm_us, soft_max
from tir_kernels.fusion.gemm.sizes.geometry import refusal
from tir_kernels.fusion.grouped.kernel import grouped_kernel
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.template import Operands

NAME = "grouped"
TARGET_KIND = "cuda"
Config = GemmConfig
SOFT = 1.6  # of the maximum of the tiles' time and the memory's, as in the model of a product


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GroupedProblem):
        return "it is no grouped product"
    if problem.n % CHUNK:
        return f"n={problem.n} must be a multiple of {CHUNK}: rows are stored 16 bytes at a time"
    one = _product(problem, problem.m)
    if refusal(one) is None and not configs(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return refusal(one)


def configs(problem: GroupedProblem, target: tvm.target.Target) -> list[Config]:
    """The measured tiles of products that one CTA computes alone, sorted by predicted time."""
    found = legal_configs(_product(problem, problem.m | 1), target)
    found = [config for config in found if config in MEASURED and config.splits == 1 and not config.tma]
    return sorted(found, key=lambda config: predict_us(problem, config, target))


def predict_us(problem: GroupedProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel, for groups of equal size."""
    return _predict_us(problem, config, gpu_of(target))


def operands(problem: GroupedProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Nothing."""
    return Operands()


def instantiate(problem: GroupedProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, offsets, out."""
    return grouped_kernel(problem, config, "grouped")


def _product(problem: GroupedProblem, m: int) -> GemmProblem:
    """A product of m rows by one of the weights."""
    return GemmProblem(m, problem.n, problem.dtype, k=problem.k, w_layout=problem.w_layout)


@lru_cache(maxsize=1 << 12)
def _predict_us(problem: GroupedProblem, config: Config, gpu: GPU) -> float:
    used = min(problem.groups, problem.m)
    tiles = used * -(-problem.m // (used * config.block_m))
    product = predict_gemm_us(_product(problem, tiles * config.block_m), replace(config, splits=1), gpu)
    return soft_max(SOFT, product, used * problem.n * problem.k * ELEMENT_BYTES / gpu.bandwidth)
