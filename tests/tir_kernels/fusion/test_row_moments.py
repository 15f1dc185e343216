"""Moments of rows: products that give them and products that read them, instead of a norm between the two."""

import numpy as np
import pytest

from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion import gemm_cuda, gemm_norm_cuda, gemv_cuda
from tir_kernels.fusion.gemm_config import GemmConfig
from tir_kernels.fusion.gemm_geometry import GemmGeometry, legal
from tir_kernels.fusion.problem import GemmProblem, RowProblem, Step
from tir_kernels.fusion.reference import fusion_reference, row_moments
from tir_kernels.target import SHARED_MEMORY, parse_target

BIAS, RESIDUAL, GELU = Step("add", "row"), Step("add", "matrix"), Step("gelu")
BY_DEVIATION = Step("multiply", "moments", 1e-5)
NORMALIZED = Step("add", "normalized", 1e-12)
CONFIGS = {
    "mma": GemmConfig(64, 64, 32, 4, 1, 3),
    "wgmma": GemmConfig(64, 64, 64, 4, 1, 3, warpgroup=True),
    "wide": GemmConfig(64, 128, 64, 4, 1, 3, warpgroup=True),
    "splits": GemmConfig(64, 64, 64, 4, 1, 3, splits=2, warpgroup=True),
    "tma": GemmConfig(64, 128, 64, 4, 1, 3, warpgroup=True, tma=True),
    "sets": GemmConfig(128, 64, 64, 4, 1, 3, warpgroup=True, tma=True, sets=2),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_product_reads_the_moments_of_its_rows(config, tmp_path):
    """Also where the last rows and columns of tiles do not exist."""
    problem = GemmProblem(72, 136, "float16", (BY_DEVIATION, BIAS, GELU), k=192)
    assert_emulated(gemm_cuda, problem, config, tmp_path)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_product_adds_a_normalized_residual_and_gives_moments(config, tmp_path):
    problem = GemmProblem(72, 192, "bfloat16", (BIAS, NORMALIZED), k=128, gives_moments="layer_norm")
    assert_emulated(gemm_cuda, problem, config, tmp_path)


def test_mean_squares_are_moments_about_zero(tmp_path):
    problem = GemmProblem(64, 64, "float16", (RESIDUAL,), k=64, gives_moments="rms_norm")
    assert_emulated(gemm_cuda, problem, CONFIGS["wgmma"], tmp_path)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_norm_between_two_products_is_folded(norm):
    """By the reference: the norm's weight and the mean go into w, its bias into that of the product."""
    rng = np.random.default_rng(0)
    x, w, weight, bias, residual = (rng.normal(size=s) for s in ((8, 128), (64, 128), (128,), (128,), (8, 64)))
    x += 5
    centred = x - x.mean(1, keepdims=True) if norm == "layer_norm" else x
    y = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + bias
    folded = w * weight
    if norm == "layer_norm":
        folded -= folded.mean(1, keepdims=True)
    problem = GemmProblem(8, 64, "float16", (BY_DEVIATION, BIAS, RESIDUAL), k=128)
    (out,) = fusion_reference(problem, x, folded, w @ bias, residual, row_moments(x, norm))
    np.testing.assert_allclose(out, y @ w.T + residual)


def test_only_the_gemm_kernel_reads_or_gives_moments():
    target = parse_target("cuda -arch=sm_90a")
    for options in ({"steps": (BY_DEVIATION,)}, {"gives_moments": "rms_norm"}):
        problem = GemmProblem(8, 64, "float16", **options, k=64)
        assert gemm_cuda.unsupported(problem, target) is None
        assert not any(c.tma and c.splits > 1 for c in gemm_cuda.configs(problem, target))
        for template in (gemv_cuda, gemm_norm_cuda):
            assert template.unsupported(problem, target)


def test_a_lane_has_whole_parts_or_the_configuration_is_illegal():
    problem = GemmProblem(64, 128, "float16", k=64, gives_moments="layer_norm")
    narrow = GemmConfig(64, 64, 32, 2, 2, 3)  # warps of 32 columns
    assert not legal(GemmGeometry(problem, narrow), SHARED_MEMORY["80"])
    wide = GemmProblem(64, 128, "float16", (BY_DEVIATION,), k=4096)
    assert not legal(GemmGeometry(wide, CONFIGS["mma"]), SHARED_MEMORY["80"])


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"n": 72, "gives_moments": "layer_norm"}, UnsupportedError),
        ({"gives_moments": "batch_norm"}, InputError),
        ({"steps": (BY_DEVIATION, NORMALIZED)}, InputError),
        ({"steps": (BY_DEVIATION,), "k": 40}, UnsupportedError),
    ],
)
def test_problems_that_make_no_sense(fields, error):
    with pytest.raises(error, match="moments"):
        GemmProblem(**{"m": 8, "n": 64, "dtype": "float16", "k": 64, **fields})


def test_steps_that_read_moments_are_those_of_products():
    with pytest.raises(InputError, match="moments"):
        RowProblem(8, 64, "float16", (BY_DEVIATION,))
    for kind, value in (("add", 1e-5), ("multiply", None), ("multiply", -1.0)):
        with pytest.raises(InputError, match="moments"):
            Step(kind, "moments", value)
