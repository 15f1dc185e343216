"""The CUDA matrix product of few rows: its generated CUDA run on the CPU against NumPy."""

import shutil

import pytest

from tests.tir_kernels.fusion.kernels import (
    assert_close,
    make_inputs,
    run_emulated,
)
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.gemm.gemv import GemvConfig
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
BIAS, RESIDUAL, GATE, SILU = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix"), Step("silu")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m, n, k, dtype="float16", **rest):
    return GemmProblem(m, n, dtype, k=k, **rest)


def assert_right(given, config, folder):
    inputs = make_inputs(given)
    ctas, threads = gemv_cuda.n_ctas(given, config), 32 * config.warps
    shared = gemv_cuda.shared_bytes(config)
    actual = run_emulated(gemv_cuda, given, config, inputs, ctas, threads, shared, folder)
    assert_close(given, actual, fusion_reference(given, *(x.double() for x in inputs)))


@needs_gxx
@pytest.mark.parametrize("m", [1, 5, 8, 9, 16])
def test_rows(m, tmp_path):
    assert_right(problem(m, 40, 264, steps=(BIAS, RESIDUAL)), GemvConfig(16, 4, 2), tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", [GemvConfig(8, 4, 1), GemvConfig(32, 8, 2), GemvConfig(16, 16, 1)], ids=str)
def test_configurations_and_steps(config, dtype, tmp_path):
    assert_right(problem(3, 64, 1032, dtype, steps=(BIAS, SILU, GATE)), config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("k", [8, 256, 1024])
def test_depths(k, tmp_path):
    assert_right(problem(2, 16, k), GemvConfig(16, 8, 4), tmp_path)


def test_what_is_not_supported_says_why():
    def reason(m=1, n=64, k=64, **rest):
        return gemv_cuda.unsupported(problem(m, n, k, **rest), SM_80)

    assert reason() is None
    assert "m=17" in reason(m=17)
    assert "kn" in reason(w_layout="kn")
    assert "n=12" in reason(n=12)
    assert "whole rows" in reason(norm=Norm("layer_norm", 1e-5))


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (16, 4096, 4096), (4, 768, 3072)])
def test_no_warp_of_a_configuration_is_idle(m, n, k):
    given = problem(m, n, k)
    found = gemv_cuda.configs(given, SM_80)
    assert found
    if k >= 4096:
        assert all(c.warps * c.unroll * gemv_cuda.UNIT <= k for c in found)
