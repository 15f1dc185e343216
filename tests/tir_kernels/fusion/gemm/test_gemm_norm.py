"""The CUDA matrix product with a norm: its generated CUDA run on the CPU against NumPy."""

import shutil

import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.target import parse_target

BIAS, RESIDUAL = Step("add", "row"), Step("add", "matrix")
LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5), Norm("rms_norm", 1e-6, bias=False)
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m, n, k, dtype="float16", norm=LAYER_NORM, **rest):
    return GemmProblem(m, n, dtype, (BIAS, RESIDUAL), norm, k=k, **rest)


@needs_gxx
@pytest.mark.parametrize(
    "norm, keeps_sum, dtype",
    [
        (LAYER_NORM, False, "float16"),
        (LAYER_NORM, True, "bfloat16"),
        (RMS_NORM, False, "bfloat16"),
        (RMS_NORM, True, "float16"),
        (Norm("layer_norm", 1e-5, weight=False), True, "float16"),
        (Norm("layer_norm", 1e-5, weight=False), False, "bfloat16"),
    ],
    ids=str,
)
def test_norms(norm, keeps_sum, dtype, tmp_path):
    given = problem(50, 264, 40, dtype, norm, keeps_sum=keeps_sum)
    assert_emulated(gemm_norm_cuda, given, GemmConfig(32, 64, 32, 1, 4, 2), tmp_path)


@needs_gxx
def test_splits_and_rows_finish_in_any_order(tmp_path):
    given = problem(70, 136, 200, keeps_sum=True)
    assert_emulated(gemm_norm_cuda, given, GemmConfig(64, 64, 32, 2, 2, 3, 3), tmp_path, runs=3)


@needs_gxx
@pytest.mark.parametrize("n", [8, 256, 1096])
def test_widths(n, tmp_path):
    assert_emulated(gemm_norm_cuda, problem(19, n, 32), GemmConfig(16, 128, 32, 1, 4, 2), tmp_path)


def test_what_is_not_supported_says_why():
    target = parse_target("cuda -arch=sm_80")
    assert gemm_norm_cuda.unsupported(problem(8, 64, 64), target) is None
    assert "no norm" in gemm_norm_cuda.unsupported(problem(8, 64, 64, norm=None), target)
    assert "n=3080" in gemm_norm_cuda.unsupported(problem(8, 3080, 64), target)
    assert "float32" in gemm_norm_cuda.unsupported(problem(8, 64, 64, "float32"), target)
