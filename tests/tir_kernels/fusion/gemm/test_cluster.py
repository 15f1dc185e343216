"""The matrix product whose splits are a cluster of CTAs: its generated CUDA run on the CPU against NumPy."""

import shutil

import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
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
        ((64, 64, 64, 4, 1, 3, 4), "nk"),
        ((64, 128, 64, 4, 1, 4, 2), "kn"),
        ((128, 192, 64, 8, 1, 5, 2), "nk"),
    ],
    ids=str,
)
def test_a_share_of_the_tile_for_each_cta(sizes, w_layout, tmp_path):
    given = problem(130, 200, 584, "bfloat16", (BIAS, GELU, RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, config(*sizes), tmp_path)


def test_clusters_are_of_two_or_four_have_one_set_and_room_for_their_sums():
    given = problem(128, 768, 3072)

    def is_legal(*sizes, **rest):
        return legal(GemmGeometry(given, config(*sizes, **rest)), SHARED_LIMIT)

    assert is_legal(64, 128, 64, 4, 1, 6, 2) and is_legal(64, 128, 64, 4, 1, 6, 4)
    assert not is_legal(64, 128, 64, 4, 1, 6, 3)
    assert is_legal(128, 192, 64, 8, 1, 5, 2) and not is_legal(128, 192, 64, 8, 1, 6, 2)  # as without clusters
    assert not is_legal(128, 128, 64, 4, 1, 3, 2, sets=2)
    assert is_legal(64, 96, 64, 4, 1, 4, 2) and not is_legal(64, 96, 64, 4, 1, 4, 4)  # 768 vectors, 4 × 128 threads


def test_only_products_of_few_tiles_are_split():
    def splits(m):
        return {c.splits for c in gemm_cuda.configs(problem(m, 768, 3072), SM_90A) if c.tma}

    assert splits(128) == {1, 2, 4}
    assert splits(8192) == {1}
