"""What the tests of the CUDA row kernels share: a case run on the CPU."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.fusion.rows.embedding import EmbeddingProblem
from tir_kernels.fusion.rows.rotary import RotaryProblem

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))
from row_cases import RowCase  # noqa: E402

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
INTEGERS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}  # as such, and a NaN


def assert_right(case: RowCase, ctas: int, threads: int, shared_bytes: int, folder: Path):
    """Generated CUDA on the CPU, CTAs in random order, within two roundings of PyTorch's float64 result."""
    inputs = case.make_inputs(0, "cpu")
    eps = torch.finfo(getattr(torch, case.problem.dtype)).eps
    expected = case.torch_sequence(*(x.double() if x.is_floating_point() else x for x in inputs))
    for actual, wanted in zip(emulate(case, inputs, ctas, threads, shared_bytes, folder), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=max(2 * eps, 1e-5), rtol=max(eps, 1e-5))


def emulate(case: RowCase, inputs, ctas: int, threads: int, shared_bytes: int, folder: Path) -> list[torch.Tensor]:
    """The outputs of the generated CUDA, run on the CPU, in float64."""
    dtype = getattr(torch, case.problem.dtype)
    integer, poison = INTEGERS[dtype.itemsize]
    outputs = [torch.full(shape, poison, dtype=integer) for shape in case.out_shapes]
    kernel = EmulatedKernel(source(case.template, case.problem, case.config), folder)
    given = [x if not x.is_floating_point() else x.view(INTEGERS[x.itemsize][0]) for x in inputs]
    arrays = [aligned(x.numpy()) for x in (*given, *outputs)]
    named = dict(zip(argument_names(case.problem), arrays, strict=True))
    kernel(named, {}, np.random.default_rng(0).permutation(ctas), threads, shared_bytes)
    return [torch.from_numpy(array).view(dtype).double() for array in arrays[len(inputs) :]]


def argument_names(problem) -> list[str]:
    """The kernels' buffers in the order of their arguments."""
    if isinstance(problem, RotaryProblem):
        return ["q", *(["k"] if problem.packed_heads is None else []), "cos", "sin", "q_out", "k_out"]
    if isinstance(problem, EmbeddingProblem):
        sources = [f"{name}{i}" for i in range(len(problem.tables)) for name in ("index", "table")]
        problem = problem.of_sum
    else:
        sources = ["x"]
    operands = [f"operand{i}" for i in range(len(problem.operand_shapes))]
    return [*sources, *operands, "out", *(["out_sum"] if problem.keeps_sum else [])]
