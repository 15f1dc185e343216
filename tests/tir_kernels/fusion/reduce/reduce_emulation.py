"""What the tests of the kernel of reductions share: a problem run on the CPU."""

from pathlib import Path

import numpy as np
import torch

from tests.gpu.group_cases import GroupCase
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.group.group_emulation import INTEGERS, assert_close, expected
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.reduce import reduce as reduce_cuda
from tir_kernels.fusion.reduce.geometry import ReduceConfig
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")


def assert_right(problem: GroupProblem, folder: Path, config: ReduceConfig | None = None, runs: int = 1):
    """Generated CUDA on the CPU, CTAs in random order, near PyTorch's float64 result; equal in every run."""
    config = config or reduce_cuda.configs(problem, SM_80)[0]
    inputs = GroupCase("", problem, config).make_inputs(0, "cpu")
    first, *others = emulate(problem, config, inputs, folder, runs)
    assert_close(problem, first, expected(problem, inputs))
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def emulate(problem: GroupProblem, config: ReduceConfig, inputs: list, folder: Path, runs: int = 1) -> list[list]:
    """The outputs of each run; they hold NaNs and largest integers before it, and the counters are left as found."""
    assert reduce_cuda.unsupported(problem, SM_80) is None
    g = reduce_cuda._geometry(problem, config)
    dtypes = [getattr(torch, dtype) for _, dtype in problem.outputs]
    kernel, results = EmulatedKernel(source(reduce_cuda, problem, config), folder), []
    arrays = {f"source{i}": aligned(x.view(INTEGERS[x.itemsize]).numpy()) for i, x in enumerate(inputs)}
    workspace = reduce_cuda.operands(problem, config, SM_80).workspace
    arrays |= {name: aligned(np.zeros(*spec)) for name, spec in zip(("partials", "arrivals"), workspace)}
    for run in range(runs):
        kinds = [INTEGERS[dtype.itemsize] for dtype in dtypes]
        outputs = [
            torch.full(shape, torch.iinfo(kind).max, dtype=kind) for (shape, _), kind in zip(problem.outputs, kinds)
        ]
        written = {f"result{i}": aligned(x.numpy()) for i, x in enumerate(outputs)}
        if "partials" in arrays:
            arrays["partials"][...] = 0x7FC00000
        ctas = np.random.default_rng(run).permutation(g.ctas)
        kernel(arrays | written, {}, ctas, g.threads, g.shared_bytes)
        assert "arrivals" not in arrays or not arrays["arrivals"].any(), "the next launch must find what this one found"
        found = [torch.from_numpy(array.copy()) for array in written.values()]
        results.append([x.view(dtype).reshape(shape) for x, dtype, (shape, _) in zip(found, dtypes, problem.outputs)])
    return results
