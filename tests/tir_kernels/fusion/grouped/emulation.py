"""What the tests of the CUDA grouped products share: a run of generated CUDA on the CPU against the definition."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned, tensor_map
from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.gemm.tma import boxes, tensor_map_fields
from tir_kernels.fusion.grouped import grouped, simt, tma
from tir_kernels.fusion.grouped.kernel import geometry, grid_size
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.problems.grouped import reference
from tir_kernels.target import parse_target

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def launch_of(problem: GroupedProblem, config) -> tuple[int, int, int]:
    """CTAs, threads of one, and bytes of its shared memory."""
    if isinstance(config, simt.Config):
        return simt.grid_size(problem, config), config.threads, simt.shared_bytes(config)
    g = geometry(problem, config)
    if config.tma:
        gpu = gpu_of(parse_target("cuda -arch=sm_90a"))
        return tma.grid_size(problem, config, gpu), g.threads, tma.shared_bytes(problem, config)
    return grid_size(problem, config), g.threads, g.shared_bytes


def maps_of(problem: GroupedProblem, config, arrays) -> dict[str, np.ndarray]:
    """The tensor maps of a and w, for a configuration that needs them."""
    if not getattr(config, "tma", False):
        return {}
    given = boxes(geometry(problem, config))
    fields = {"w": tensor_map_fields(arrays["w"].shape, (1, *given["w"]))}
    if problem.gathered_from is None:
        fields["a"] = tensor_map_fields(arrays["a"].shape, given["a"])
    return {f"{name}_map": tensor_map(arrays[name], 0, of) for name, of in fields.items()}


def assert_emulated(problem: GroupedProblem, config, ends, folder, infinite=False):
    """One kernel for all offsets in `ends`; CTAs in random order, and a row that is not written is NaN.

    `infinite`: what no row of the result depends on, rows of no group and weights of empty ones, is infinite.
    """
    template = simt if isinstance(config, simt.Config) else grouped
    arch = "sm_90a" if getattr(config, "warpgroup", False) else "sm_80"
    kernel = EmulatedKernel(source(template, problem, config, arch), folder)
    bits = torch.int32 if problem.dtype == "float32" else torch.int16
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, problem.dtype)
    (ctas, *size), eps = launch_of(problem, config), max(torch.finfo(dtype).eps, 1e-6)
    for seed, end in enumerate(ends):
        a = torch.randn((problem.a_rows, problem.k), generator=generator).to(dtype)
        w = (torch.randn(problem.w_shape, generator=generator) * problem.k**-0.5).to(dtype)
        end = torch.as_tensor(end, dtype=getattr(torch, problem.offsets_dtype))
        rows = []
        if problem.gathered_from is not None:  # with rows on either side of a that do not exist
            drawn = torch.randint(-1, problem.a_rows + 1, (problem.m,), generator=generator)
            rows = [drawn.to(getattr(torch, problem.rows_dtype))]
        (expected,) = reference(problem, [a.double(), w.double(), end, *rows], torch)
        if infinite:
            a[end[-1] :] = torch.inf
            w[end == torch.cat([end.new_zeros(1), end[:-1]])] = torch.inf
        out = torch.full((problem.m, problem.n), torch.nan, dtype=dtype)
        arrays = {name: aligned(x.view(bits).numpy()) for name, x in (("a", a), ("w", w), ("out", out))}
        arrays |= {name: aligned(x.numpy()) for name, x in zip(("offsets", "rows"), (end, *rows))}
        maps = maps_of(problem, config, arrays)
        kernel(arrays | maps, {}, np.random.default_rng(seed).permutation(ctas), *size)
        actual = torch.from_numpy(arrays["out"].copy()).view(dtype).double()
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), atol=2 * eps, rtol=eps)
