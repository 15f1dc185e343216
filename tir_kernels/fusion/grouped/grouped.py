"""Grouped product on CUDA (sm_80 and up): mma.sync, or wgmma on sm_90a.

Copies are cp.async's (`kernel.py`), on sm_90a also the tensor memory accelerator's (`tma.py`).
"""

import math
from dataclasses import replace
from functools import lru_cache

import tvm

from tir_kernels.cuda.device import GPU, gpu_of
from tir_kernels.cuda.shared_tiles import CHUNK, ELEMENT_BYTES
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED_WITH_GROUPS, legal_configs
from tir_kernels.fusion.gemm.sizes.cost import predict_gemm_us, soft_max
from tir_kernels.fusion.gemm.sizes.geometry import refusal
from tir_kernels.fusion.grouped.kernel import grouped_kernel
from tir_kernels.fusion.grouped.problem import INT32_ELEMENTS, GroupedProblem
from tir_kernels.fusion.grouped.tma import grouped_tma_kernel, shared_bytes
from tir_kernels.template import Operands

NAME = "grouped"
TARGET_KIND = "cuda"
Config = GemmConfig
SHARED_LIMIT = "max_shared_memory_per_block"  # attribute of a target
LIST_US = 2.0  # to list tiles and find the first, before anything is copied
SOFT = 1.6  # of the maximum of the tiles' time and the memory's, as in the model of a product


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GroupedProblem):
        return "it is no grouped product"
    if problem.n % CHUNK:
        return f"n={problem.n} must be a multiple of {CHUNK}: rows are stored 16 bytes at a time"
    if problem.gathered_from is not None and problem.a_rows * problem.k >= INT32_ELEMENTS:
        return f"a matrix of shape ({problem.a_rows}, {problem.k}) has 2^31 elements or more; indices are 32-bit"
    one = problem.product(problem.m)
    if refusal(one) is None and not configs(problem, target):
        gathers = problem.gathered_from is not None
        return (
            f"no configuration {'gathers rows on' if gathers else 'fits the shared memory of'} {target.attrs['arch']}"
        )
    return refusal(one)


def configs(problem: GroupedProblem, target: tvm.target.Target) -> list[Config]:
    """The measured tiles of products that one CTA computes alone, sorted by predicted time."""
    found, limit = legal_configs(problem.product(problem.m | 1), target), int(target.attrs[SHARED_LIMIT])
    found = [config for config in found if config in MEASURED_WITH_GROUPS and config.splits == 1]
    found = [config for config in found if not config.tma or shared_bytes(problem, config) <= limit]
    if problem.gathered_from is not None:
        found = [config for config in found if config.tma]
    return sorted(found, key=lambda config: predict_us(problem, config, target))


def predict_us(problem: GroupedProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel, for groups of about equal size."""
    return _predict_us(problem, config, gpu_of(target))


def operands(problem: GroupedProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Nothing."""
    return Operands()


def instantiate(problem: GroupedProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, offsets, rows where they are gathered, out."""
    if config.tma:
        return grouped_tma_kernel(problem, config, "grouped", gpu_of(target))
    return grouped_kernel(problem, config, "grouped")


@lru_cache(maxsize=1 << 12)
def _predict_us(problem: GroupedProblem, config: Config, gpu: GPU) -> float:
    used = min(problem.groups, problem.m)
    product = predict_gemm_us(problem.product(_tiled_rows(problem, config)), replace(config, splits=1), gpu, True)
    weights = used * problem.w_columns * problem.k * ELEMENT_BYTES / gpu.bandwidth
    return LIST_US * config.tma + soft_max(SOFT, product, weights)


def _tiled_rows(problem: GroupedProblem, config: Config) -> int:
    """Rows of all tiles, those past the ends of groups included: half a tile a group, whose size may be any.

    Warpgroups without rows multiply nothing, but wait for the others of their tile: it takes as long (H200).
    """
    used, block_m = min(problem.groups, problem.m), config.block_m
    return max(used, math.ceil(problem.m / block_m + used / 2)) * block_m
