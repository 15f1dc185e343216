"""What the tests of the kernel of elementwise groups share: a problem run on the CPU, and PyTorch's float64 result."""

from pathlib import Path

import numpy as np
import torch

from tests.gpu.group_cases import GroupCase
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.fusion.group import group as group_cuda
from tir_kernels.fusion.group.domains import domains_of
from tir_kernels.fusion.group.parts import part_of
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.problems import group as group_kind
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; their largest is a NaN of floats


def assert_right(problem: GroupProblem, folder: Path, config: group_cuda.GroupConfig | None = None, seed: int = 0):
    """Generated CUDA on the CPU, CTAs in random order, within two roundings of PyTorch's float64 result."""
    config = config or group_cuda.configs(problem, SM_80)[0]
    inputs = GroupCase("", problem, config).make_inputs(seed, "cpu")
    assert_close(problem, emulate(problem, config, inputs, folder, seed), expected(problem, inputs))


def expected(problem: GroupProblem, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What PyTorch computes in float64."""
    return group_kind.reference(problem, [x.double() if x.is_floating_point() else x for x in inputs], torch)


def assert_close(problem: GroupProblem, actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Integers and booleans equal, floats within two roundings; nothing poisoned is left."""
    for found, right, (shape, dtype) in zip(actual, wanted, problem.outputs, strict=True):
        assert found.shape == right.shape == shape and found.dtype == getattr(torch, dtype)
        if not found.is_floating_point():
            # Not as booleans: each byte but 0 would be true.
            right = right.to(found.dtype)
            as_integers = [x.view(INTEGERS[x.itemsize]) for x in (found, right)]
            torch.testing.assert_close(*as_integers, rtol=0, atol=0)
            continue
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), right.double(), atol=max(4 * eps, 1e-5), rtol=max(2 * eps, 1e-5))


def emulate(problem, config, inputs: list[torch.Tensor], folder: Path, seed: int = 0) -> list[torch.Tensor]:
    """The outputs of the generated CUDA, run on the CPU; they hold NaNs and largest integers before it runs."""
    assert group_cuda.unsupported(problem, SM_80) is None
    dtypes = [getattr(torch, dtype) for _, dtype in problem.outputs]
    kinds = [INTEGERS[dtype.itemsize] for dtype in dtypes]
    outputs = [torch.full(shape, torch.iinfo(x).max, dtype=x) for (shape, _), x in zip(problem.outputs, kinds)]
    arrays = [aligned(x.view(INTEGERS[x.itemsize]).numpy()) for x in (*inputs, *outputs)]
    names = [f"source{i}" for i in range(len(inputs))] + [f"result{i}" for i in range(len(outputs))]
    parts = [part_of(problem, domain, config.threads, config.vectors_per_thread) for domain in domains_of(problem)]
    ctas = np.random.default_rng(seed).permutation(sum(part.ctas for part in parts))
    kernel = EmulatedKernel(source(group_cuda, problem, config), folder)
    kernel(dict(zip(names, arrays)), {}, ctas, config.threads, max(part.shared_bytes for part in parts))
    found = [torch.from_numpy(array) for array in arrays[len(inputs) :]]
    return [x.view(dtype).reshape(shape) for x, dtype, (shape, _) in zip(found, dtypes, problem.outputs)]
