"""Predicted time of the CUDA row kernels: a launch, and what they read and write once through memory."""

import math

import tvm

from tir_kernels.cuda.device import ARCHITECTURES, Architecture
from tir_kernels.fusion.problem import RowProblem

START_US = 2.0  # launch, first loads, last stores
REACHED_BANDWIDTH = 0.93
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def architecture(target: tvm.target.Target) -> Architecture:
    """The target's device; an H200 stands for those that are not listed."""
    number = str(target.attrs["arch"]).removeprefix("sm_").rstrip("af")
    return ARCHITECTURES.get(number, ARCHITECTURES["90"])


def multiprocessors(target: tvm.target.Target) -> int:
    """Number of multiprocessors of the target's device; an H200's where it is not listed."""
    return architecture(target).multiprocessors


def row_bytes(problem: RowProblem) -> int:
    """Bytes of a RowProblem's inputs and outputs, each once."""
    elements = problem.m * problem.n * (2 + problem.keeps_sum) + sum(map(math.prod, problem.operand_shapes))
    return elements * ELEMENT_BYTES[problem.dtype]


def predict_bytes_us(moved: int, target: tvm.target.Target) -> float:
    """Predicted microseconds of a kernel that does nothing but move so many bytes."""
    return START_US + moved / (REACHED_BANDWIDTH * architecture(target).bandwidth)


def predict_row_us(problem: RowProblem, target: tvm.target.Target) -> float:
    """Predicted microseconds of a kernel that reads and writes a RowProblem's inputs and outputs once."""
    return predict_bytes_us(row_bytes(problem), target)
