"""Predicted time of the CUDA row kernels: a launch, and what they read and write once through memory."""

import math

import tvm

from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.problem import RowProblem

START_US = 2.0  # launch, first loads, last stores
REACHED_BANDWIDTH = 0.93
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def row_bytes(problem: RowProblem) -> int:
    """Bytes of a RowProblem's inputs and outputs, each once."""
    elements = problem.m * problem.n * (2 + problem.keeps_sum) + sum(map(math.prod, problem.operand_shapes))
    return elements * ELEMENT_BYTES[problem.dtype]


def predict_bytes_us(moved: int, target: tvm.target.Target) -> float:
    """Predicted microseconds of a kernel that does nothing but move `moved` bytes."""
    return START_US + moved / (REACHED_BANDWIDTH * gpu_of(target).bandwidth)


def predict_row_us(problem: RowProblem, target: tvm.target.Target) -> float:
    """Predicted microseconds of a kernel that reads and writes a RowProblem's inputs and outputs once."""
    return predict_bytes_us(row_bytes(problem), target)
