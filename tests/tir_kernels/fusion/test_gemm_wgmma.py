"""The matrix product by wgmma: its generated CUDA run on the CPU against NumPy, and compiled without lost registers."""

import shutil

import pytest

from tests.gpu.sources import source
from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.cuda_compile import run_nvcc
from tir_kernels.fusion import gemm_cuda, gemm_norm_cuda
from tir_kernels.fusion.gemm_config import GemmConfig
from tir_kernels.fusion.gemm_configs import TMA_TILES, WARPGROUP_TILES
from tir_kernels.fusion.gemm_geometry import GemmGeometry
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.target import parse_target

SM_80, SM_90, SM_90A = (parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90", "sm_90a"))
BIAS, GELU, RESIDUAL, GATE = Step("add", "row"), Step("gelu"), Step("add", "matrix"), Step("multiply", "matrix")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")
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
def test_a_norm_and_the_sum_before_it(tmp_path):
    given = problem(70, 136, 72, steps=(BIAS, RESIDUAL), norm=Norm("layer_norm", 1e-5), keeps_sum=True)
    assert_emulated(gemm_norm_cuda, given, config(64, 64, 64, 4, 1, 3), tmp_path, runs=2)


def assert_compiles_well(given, config):
    g = GemmGeometry(given, config)
    _, log = run_nvcc(source(gemm_cuda, given, config, "sm_90a"), "cubin", ["-gencode", "arch=compute_90a,code=sm_90a"])
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "wgmma.mma_async instructions are serialized" not in log
    registers = int(log.split(" registers")[0].split()[-1])
    assert g.min_blocks_per_sm * g.threads * registers <= 65536


@needs_nvcc
@pytest.mark.parametrize("sizes", [(128, 128, 64, 8, 1, 3), (64, 128, 64, 4, 1, 4, 2)], ids=str)
def test_compiles_without_spills(sizes):
    assert_compiles_well(problem(2048, 4096, 1024, steps=(BIAS, GELU)), config(*sizes))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("tile, w_layout", layouts([*WARPGROUP_TILES, *TMA_TILES]), ids=str)
def test_every_tile_compiles_without_spills(tile, w_layout):
    block_m, block_n, warps_m, warps_n, *sets = tile
    given = problem(4001, 4104, 1032, steps=(BIAS, GELU, RESIDUAL), w_layout=w_layout)
    copies = {"tma": True, "sets": sets[0]} if sets else {}
    one = config(block_m, block_n, 64, warps_m, warps_n, 3, **copies)
    assert one in gemm_cuda.configs(given, SM_90A)
    assert_compiles_well(given, one)


def test_only_sm_90a_has_it():
    given = problem(512, 768, 768)
    for target, has in ((SM_80, False), (SM_90, False), (SM_90A, True)):
        assert any(c.warpgroup for c in gemm_cuda.configs(given, target)) == has
