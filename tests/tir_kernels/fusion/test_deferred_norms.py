"""Deferred norms in the CUDA matrix products: their generated CUDA run on the CPU against NumPy."""

import shutil

import numpy as np
import pytest
import torch

from tests.tir_kernels.fusion.kernels import arch_of, make_inputs, run_emulated
from tir_kernels.fusion import gemm_cuda
from tir_kernels.fusion.deferred_norm_cuda import statistics_operand
from tir_kernels.fusion.gemm_config import GemmConfig
from tir_kernels.fusion.gemm_geometry import GemmGeometry
from tir_kernels.fusion.gemm_tma import grid_size
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference, row_statistics

BIAS, GELU, RESIDUAL = Step("add", "row"), Step("gelu"), Step("add", "matrix")
LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5), Norm("rms_norm", 1e-6, bias=False)
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def normed(norm) -> Step:
    return Step("add", "normed", norm=norm)


def of_normed(norm, m=70, n=72, k=192, steps=(BIAS, GELU), dtype="float16", **rest) -> GemmProblem:
    """The product of a norm's result."""
    return GemmProblem(m, n, dtype, steps, k=k, a_norm=Norm(norm.kind, norm.eps, False, False), **rest)


def with_normed(norm, m=70, n=128, k=72, dtype="float16", **rest) -> GemmProblem:
    """A product to which a norm's result is added, and whose own norm is deferred."""
    return GemmProblem(m, n, dtype, (BIAS, normed(norm)), k=k, statistics=True, **rest)


def inputs_of(problem, mean=0.0) -> list[torch.Tensor]:
    """Random inputs, with statistics that are those of the matrix normalised, of rows around `mean`."""
    inputs = make_inputs(problem)
    if problem.row_norm is not None:
        at = 2 + statistics_operand(problem)
        matrix = 0 if problem.a_norm is not None else at - 1
        inputs[matrix] += mean
        inputs[at] = torch.from_numpy(row_statistics(inputs[matrix].double().numpy())).float()
    if problem.a_norm is not None and problem.a_norm.kind == "layer_norm":
        inputs[3][0] = inputs[1].float().sum(1 if problem.w_layout == "nk" else 0)
    return inputs


def assert_emulated(problem, config, folder, mean=0.0, runs=1):
    """The kernel's CUDA on the CPU gives the reference's result, and the statistics of what it stored."""
    g = GemmGeometry(problem, config)
    inputs = inputs_of(problem, mean)
    ctas = grid_size(g, arch_of(config)) if config.tma else g.ctas
    cluster = config.splits if g.in_clusters else 1
    out, *statistics = run_emulated(
        gemm_cuda, problem, config, inputs, ctas, g.threads, g.shared_bytes, folder, runs, cluster
    )
    expected = fusion_reference(problem, *(x.double() for x in inputs))[0]
    eps = torch.finfo(getattr(torch, problem.dtype)).eps
    # Where the mean is large, so is what the product has before it is taken away, in float32.
    np.testing.assert_allclose(out, expected, atol=2 * eps + 1e-5 * abs(mean), rtol=eps)
    for one in statistics:
        np.testing.assert_allclose(one, row_statistics(out), atol=1e-5, rtol=1e-5)


def wgmma(*sizes, **rest) -> GemmConfig:
    return GemmConfig(*sizes, warpgroup=True, **rest)


CONFIGS = {
    "mma": GemmConfig(64, 64, 32, 4, 1, 3),
    "mma splits": GemmConfig(64, 128, 32, 2, 2, 2, 2),
    "wgmma": wgmma(64, 64, 64, 4, 1, 3),
    "wgmma splits": wgmma(64, 128, 64, 4, 1, 3, 2),
    "tma": wgmma(64, 64, 64, 4, 1, 3, tma=True),
    "tma parts": wgmma(128, 128, 64, 4, 1, 3, tma=True),
    "tma sets": wgmma(64, 64, 64, 4, 1, 3, tma=True, sets=2),
    "cluster": wgmma(64, 64, 64, 4, 1, 3, 2, tma=True),
    "cluster of four": wgmma(64, 64, 64, 4, 1, 3, 4, tma=True),
}


@needs_gxx
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=lambda norm: norm.kind)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_product_of_a_norm(name, norm, tmp_path):
    w_layout = "kn" if norm is RMS_NORM else "nk"
    assert_emulated(of_normed(norm, k=512, w_layout=w_layout), CONFIGS[name], tmp_path)


@needs_gxx
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=lambda norm: norm.kind)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_norm_is_added_and_statistics_are_written(name, norm, tmp_path):
    w_layout, dtype = ("kn", "float16") if norm is LAYER_NORM else ("nk", "bfloat16")
    assert_emulated(with_normed(norm, k=264, w_layout=w_layout, dtype=dtype), CONFIGS[name], tmp_path)
