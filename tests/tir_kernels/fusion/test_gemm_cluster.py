"""The matrix product whose splits are a cluster of CTAs: its generated CUDA run on the CPU against NumPy."""

import shutil

import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.fusion import gemm_cuda
from tir_kernels.fusion.gemm_geometry import GemmConfig, GemmGeometry, legal
from tir_kernels.fusion.problem import GemmProblem, Step
from tir_kernels.target import parse_target

BIAS, GELU, RESIDUAL = Step("add", "row"), Step("gelu"), Step("add", "matrix")
SHARED_LIMIT = 232448  # of sm_90a
SM_90A = parse_target("cuda -arch=sm_90a")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m, n, k, dtype="float16", steps=(BIAS,), **rest):
    return GemmProblem(m, n, dtype, steps, k=k, **rest)


def config(*sizes, **rest):
    return GemmConfig(*sizes, warpgroup=True, tma=True, **rest)


@needs_gxx
@pytest.mark.parametrize(
    "sizes, w_layout",
    [
        ((64, 64, 64, 4, 1, 3, 2), "nk"),
        ((64, 64, 64, 4, 1, 4, 4), "kn"),
        ((128, 96, 64, 8, 1, 3, 3), "nk"),  # the last split is shorter
        ((64, 176, 64, 4, 1, 3, 5), "nk"),  # 1408 vectors are no whole shares of five CTAs
    ],
    ids=str,
)
def test_a_share_of_the_tile_for_each_cta(sizes, w_layout, tmp_path):
    given = problem(130, 200, 584, "bfloat16", (BIAS, GELU, RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, config(*sizes), tmp_path)


def test_clusters_are_small_have_one_set_and_room_for_their_sums():
    given, sizes = problem(128, 768, 3072), (128, 128, 64, 8, 1)
    assert legal(GemmGeometry(given, config(*sizes, 4, 8)), SHARED_LIMIT)
    assert not legal(GemmGeometry(given, config(*sizes, 4, 9)), SHARED_LIMIT)
    assert not legal(GemmGeometry(given, config(*sizes, 6, 8)), SHARED_LIMIT)
    assert not legal(GemmGeometry(given, config(128, 128, 64, 4, 1, 4, 2, sets=2)), SHARED_LIMIT)


def test_only_products_of_few_tiles_are_split():
    def splits(m):
        return {c.splits for c in gemm_cuda.configs(problem(m, 768, 3072), SM_90A) if c.tma}

    assert splits(512) == {1, 2, 3, 4, 6, 8}
    assert splits(8192) == {1}
