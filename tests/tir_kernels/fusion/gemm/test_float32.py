"""The CUDA matrix product in float32: its generated CUDA run on the CPU, against float64 and PyTorch's own error."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tir_kernels.attention.float32 import tf32
from tests.tir_kernels.fusion.kernels import ctas_of, make_inputs, run_emulated
from tir_kernels.cuda.float32.modes import MODES
from tir_kernels.errors import InputError
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm, gemv
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import FLOAT32_TILES
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
from tir_kernels.fusion.mlp import mlp
from tir_kernels.fusion.problem import ACTIVATIONS, GemmProblem, MlpProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.problems import gemm as gemm_kind
from tir_kernels.target import parse_target

SM_80, HOPPER = parse_target("cuda -arch=sm_80"), parse_target("cuda -arch=sm_90a")
BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
SMALL = GemmConfig(32, 64, 32, 1, 4, 3)
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m=70, n=136, k=164, float32="ieee", **rest):
    return GemmProblem(m, n, "float32", k=k, float32=float32, **rest)


def assert_emulated(given, config, folder, runs=1):
    """Not further from float64 than twice PyTorch's float32 or tf32, or 2^-20 times the largest element."""
    g = GemmGeometry(given, config)
    inputs = make_inputs(given)
    out = run_emulated(gemm_cuda, given, config, inputs, ctas_of(g), g.threads, g.shared_bytes, folder, runs)[0]
    exact = np.asarray(fusion_reference(given, *(x.double() for x in inputs))[0])
    rounded = [tf32(x) for x in inputs[:2]] if given.float32 == "tf32" else inputs[:2]
    theirs = gemm_kind.reference(replace(given, float32="ieee"), [*rounded, *inputs[2:]], torch)[0].double().numpy()
    allowed = max(2 * np.abs(theirs - exact).max(), 2.0**-20 * np.abs(exact).max())
    assert np.abs(out - exact).max() <= allowed


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("tile, w_layout", zip(FLOAT32_TILES, itertools.cycle(["nk", "kn"])), ids=str)
def test_every_tile_with_ragged_edges(tile, w_layout, tmp_path):
    block_m, block_n, warps_m, warps_n = tile
    given = problem(block_m + 3, block_n + 8, 52, steps=(BIAS,), w_layout=w_layout)
    assert_emulated(given, GemmConfig(block_m, block_n, 32, warps_m, warps_n, 3), tmp_path)


@needs_gxx
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("mode", MODES)
def test_layouts_and_modes(mode, w_layout, tmp_path):
    given = problem(float32=mode, steps=(BIAS, Step("silu"), GATE, RESIDUAL), w_layout=w_layout)
    assert_emulated(given, SMALL, tmp_path)


@needs_gxx
@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "relu"])
def test_activations(kind, tmp_path):
    assert_emulated(problem(32, 64, 64, steps=(Step("scale", value=3.0), Step(kind))), SMALL, tmp_path)


@needs_gxx
@pytest.mark.parametrize("block_k, k, stages", [(16, 4, 2), (16, 100, 4), (32, 4, 3), (32, 100, 2)])
def test_pipelines(k, block_k, stages, tmp_path):
    assert_emulated(problem(16, 64, k), GemmConfig(16, 64, block_k, 1, 4, stages), tmp_path)


@needs_gxx
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_splits_in_any_order_give_one_result(w_layout, tmp_path):
    given = problem(40, 72, 200, steps=(BIAS, RESIDUAL), w_layout=w_layout)
    assert_emulated(given, GemmConfig(32, 64, 32, 1, 4, 2, 3), tmp_path, runs=2)


def test_what_is_not_supported_says_why():
    assert gemm_cuda.unsupported(problem(), SM_80) is None
    assert gemm_cuda.unsupported(problem(k=4), SM_80) is None
    assert "n=132 must be a multiple of 8" in gemm_cuda.unsupported(problem(n=132, w_layout="kn"), SM_80)
    assert "k=6 must be a multiple of 4" in gemm_cuda.unsupported(problem(k=6), SM_80)
    deferred = problem(n=128, k=128, a_norm=Norm("rms_norm", 1e-5, False, False))
    assert "deferred norms" in gemm_cuda.unsupported(deferred, SM_80)
    few = "computes in float16 or bfloat16, not in float32"
    assert few in gemm_norm.unsupported(problem(norm=Norm("layer_norm", 1e-5)), SM_80)
    assert few in gemv.unsupported(problem(m=1), SM_80)
    assert few in mlp.unsupported(MlpProblem(problem(n=128), problem(k=128)), SM_80)


def test_a_mode_belongs_to_float32():
    with pytest.raises(InputError, match="float32='tf32' for operands of bfloat16"):
        GemmProblem(8, 8, "bfloat16", k=8, float32="tf32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("w_layout", ["nk", "kn"])
@pytest.mark.parametrize("sizes", [(128, 768, 3072), (1, 768, 768), (2048, 4096, 1024), (100, 8, 4)])
def test_configurations_fit_and_the_default_has_the_least_predicted_time(sizes, w_layout, mode):
    for target in (SM_80, HOPPER):
        given = problem(*sizes, float32=mode, w_layout=w_layout)
        configs = gemm_cuda.configs(given, target)
        assert len(set(configs)) == len(configs) > 0
        assert not any(c.warpgroup or c.tma for c in configs)
        limit = int(target.attrs["max_shared_memory_per_block"])
        assert all(legal(GemmGeometry(given, c), limit) for c in configs)
        times = [gemm_cuda.predict_us(given, c, target) for c in configs]
        assert times == sorted(times)


def test_products_are_predicted_to_take_longer_the_more_passes_they_have():
    half = GemmProblem(4096, 4096, "float16", k=4096)
    modes = [problem(4096, 4096, 4096, mode) for mode in ("tf32", "ieee")]
    first = lambda given: gemm_cuda.predict_us(given, gemm_cuda.configs(given, SM_80)[0], SM_80)
    assert first(half) < first(modes[0]) < first(modes[1])
