"""Predicted time of the kernels that sort: a launch, and the longer of their comparisons and their bytes."""

import math

import tvm

from tir_kernels.cuda.device import WARP, gpu_of
from tir_kernels.fusion.rows.cost import predict_bytes_us

INSTRUCTIONS = 7  # of a step of a search
CYCLES_PER_US = 1700.0
LATENCY = 30  # cycles that a warp waits for a step, where too few other warps run


def predict_sorting_us(problem, threads: int, cta_threads: int, steps: int, target: tvm.target.Target) -> float:
    """Predicted microseconds of `threads` threads in CTAs of `cta_threads`, each of which takes `steps` steps."""
    gpu = gpu_of(target)
    moved = sum(math.prod(shape) * tvm.DataType(dtype).itemsize for shape, dtype in (*problem.inputs, *problem.outputs))
    rate = gpu.partitions * gpu.multiprocessors
    issued = max(threads / WARP / rate, cta_threads / WARP / gpu.partitions) * steps * INSTRUCTIONS
    return predict_bytes_us(moved, target) + max(issued, steps * LATENCY) / CYCLES_PER_US
