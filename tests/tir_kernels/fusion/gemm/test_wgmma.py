"""The matrix product by wgmma: its generated CUDA run on the CPU against NumPy.

tests/gpu/test_all_cases.py: what its compiled kernels need.
"""

import shutil

import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import WARPGROUP_TILES
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.target import parse_target

SM_80, SM_90, SM_90A = (parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90", "sm_90a"))
BIAS, GELU, RESIDUAL, GATE = Step("add", "row"), Step("gelu"), Step("add", "matrix"), Step("multiply", "matrix")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m=70, n=136, k=168, dtype="float16", steps=(BIAS,), **rest):
    return GemmProblem(m, n, dtype, steps, k=k, **rest)


def config(*sizes, **rest):
    return GemmConfig(*sizes, warpgroup=True, **rest)


def layouts(tiles) -> list:
    """Each tile and layout of w: with rows of w along n, a warpgroup has whole panels of 64 columns."""
    has_panels = lambda tile: tile[1] % (64 * tile[3]) == 0
    return [(tile, layout) for tile in tiles for layout in ("nk", "kn") if layout == "nk" or has_panels(tile)]


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("tile, w_layout", layouts(WARPGROUP_TILES), ids=str)
def test_every_tile_with_ragged_edges(tile, w_layout, tmp_path):
    block_m, block_n, warps_m, warps_n = tile
    given = problem(block_m + 3, block_n + 8, 200, steps=(BIAS, RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, config(block_m, block_n, 64, warps_m, warps_n, 3), tmp_path)


@needs_gxx
@pytest.mark.parametrize("stages", [3, 4, 5])
@pytest.mark.parametrize("k", [8, 72, 64 * 7])
def test_pipelines(k, stages, tmp_path):
    assert_emulated(gemm_cuda, problem(64, 64, k), config(64, 64, 64, 4, 1, stages), tmp_path)


@needs_gxx
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_bfloat16_two_warpgroups_and_steps_with_operands(w_layout, tmp_path):
    given = problem(70, 136, 136, "bfloat16", (BIAS, Step("silu"), GATE, RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, config(64, 128, 64, 4, 2, 3), tmp_path)


@needs_gxx
def test_splits_in_any_order_give_one_result(tmp_path):
    assert_emulated(
        gemm_cuda, problem(70, 72, 456, steps=(BIAS, GELU)), config(64, 64, 64, 4, 1, 3, 3), tmp_path, runs=2
    )


@needs_gxx
@pytest.mark.parametrize("w_layout, k, splits", [("nk", 264, 2), ("kn", 256, 1)])
def test_a_batch_of_products(w_layout, k, splits, tmp_path):
    given = problem(4 * 70, 72, k, steps=(BIAS,), w_layout=w_layout, batch=4, matrices=2)
    assert_emulated(gemm_cuda, given, config(64, 64, 64, 4, 1, 3, splits), tmp_path)


@needs_gxx
def test_a_norm_and_the_sum_before_it(tmp_path):
    given = problem(70, 136, 72, steps=(BIAS, RESIDUAL), norm=Norm("layer_norm", 1e-5), keeps_sum=True)
    assert_emulated(gemm_norm_cuda, given, config(64, 64, 64, 4, 1, 3), tmp_path, runs=2)


def test_only_sm_90a_has_it():
    given = problem(512, 768, 768)
    for target, has in ((SM_80, False), (SM_90, False), (SM_90A, True)):
        assert any(c.warpgroup for c in gemm_cuda.configs(given, target)) == has
