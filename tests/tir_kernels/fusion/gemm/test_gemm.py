"""The CUDA matrix product: its generated CUDA run on the CPU against NumPy."""

import itertools
import re
import shutil
from dataclasses import replace

import pytest

from tests.gpu.sources import source
from tests.tir_kernels.fusion.kernels import assert_emulated
from tir_kernels.errors import StofError
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import TILES
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
from tir_kernels.fusion.problem import ACTIVATIONS, GemmProblem, Norm, Step
from tir_kernels.target import parse_target

SHARED_LIMIT = 166912  # of sm_80
SM_80 = parse_target("cuda -arch=sm_80")
BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
SMALL = GemmConfig(32, 64, 32, 1, 4, 3)
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(m=70, n=136, k=168, dtype="float16", **rest):
    return GemmProblem(m, n, dtype, k=k, **rest)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("tile, w_layout", zip(TILES, itertools.cycle(["nk", "kn"])), ids=str)
def test_every_tile_with_ragged_edges(tile, w_layout, tmp_path):
    block_m, block_n, warps_m, warps_n = tile
    if block_n & block_n - 1:  # rows of w along n are copied in powers of two
        w_layout = "nk"
    given = problem(block_m + 3, block_n + 8, 104, steps=(BIAS,), w_layout=w_layout)
    config = GemmConfig(block_m, block_n, 32, warps_m, warps_n, 3)
    if not legal(GemmGeometry(given, config), SHARED_LIMIT):  # 256 threads copy 64 rows of 32 elements at once
        config = replace(config, block_k=64)
    assert_emulated(gemm_cuda, given, config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind, tmp_path):
    assert_emulated(gemm_cuda, problem(32, 64, 64, steps=(Step("scale", value=3.0), Step(kind))), SMALL, tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "dtype, steps",
    [
        ("bfloat16", ()),
        ("float16", (BIAS, RESIDUAL)),
        ("bfloat16", (BIAS, Step("silu"), GATE)),
        ("float16", (GATE, BIAS, Step("multiply", "row"), RESIDUAL, Step("relu"))),
        ("bfloat16", (GATE, BIAS, Step("multiply", "row"), RESIDUAL, Step("relu"))),
    ],
    ids=lambda x: x if isinstance(x, str) else len(x),
)
def test_steps_with_operands(steps, dtype, tmp_path):
    assert_emulated(gemm_cuda, problem(50, 72, 40, dtype, steps=steps), SMALL, tmp_path)


@needs_gxx
@pytest.mark.parametrize(  # short of a pipeline, and ragged
    "stages, block_k, k",
    [(2, 32, 8), (2, 64, 328), (3, 64, 96), (3, 32, 328), (4, 64, 96), (4, 64, 328), (5, 32, 8), (5, 32, 328)],
)
def test_pipelines(k, block_k, stages, tmp_path):
    assert_emulated(gemm_cuda, problem(16, 64, k), GemmConfig(16, 64, block_k, 1, 4, stages), tmp_path)


@needs_gxx
@pytest.mark.parametrize("w_layout, splits", [("nk", 3), ("kn", 2)])
def test_splits_in_any_order_give_one_result(w_layout, splits, tmp_path):
    given = problem(70, 136, 200, steps=(BIAS, Step("gelu"), RESIDUAL), w_layout=w_layout)
    assert_emulated(gemm_cuda, given, GemmConfig(32, 128, 32, 1, 4, 2, splits), tmp_path, runs=2)


@needs_gxx
@pytest.mark.parametrize("n, splits", [(137, 1), (70, 1), (66, 2)])
def test_rows_that_begin_anywhere(n, splits, tmp_path):
    given = problem(40, n, 104, "bfloat16" if n % 2 else "float16", steps=(BIAS, Step("gelu")))
    assert_emulated(gemm_cuda, given, replace(SMALL, splits=splits), tmp_path)


@needs_gxx
def test_groups_of_tiles_reach_every_tile(tmp_path):
    assert_emulated(gemm_cuda, problem(16 * 11, 64 * 3, 16), GemmConfig(16, 64, 32, 1, 4, 2), tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "w_layout, splits, matrices",
    [("nk", 1, 2), ("kn", 1, 6), ("nk", 2, 1), ("nk", 2, 6), ("kn", 2, 2), ("kn", 1, 1)],
)
def test_a_batch_of_products(w_layout, splits, matrices, tmp_path):
    """Tiles that end past a part of the rows begin earlier; columns past a matrix are those of the next one."""
    k = 168 if w_layout == "nk" else 160
    given = problem(6 * 39, 72, k, steps=(BIAS, RESIDUAL), w_layout=w_layout, batch=6, matrices=matrices)
    assert_emulated(gemm_cuda, given, replace(SMALL, splits=splits), tmp_path, runs=splits)


@needs_gxx
@pytest.mark.parametrize("n, splits, matrices", [(14, 1, 3), (70, 2, 6), (33, 1, 1)])
def test_a_batch_of_products_of_odd_columns(n, splits, matrices, tmp_path):
    """As the terms of SAM's relative positions are, in windows of 14 × 14."""
    given = problem(6 * 39, n, 168, steps=(BIAS, Step("gelu")), batch=6, matrices=matrices)
    assert_emulated(gemm_cuda, given, replace(SMALL, splits=splits), tmp_path, runs=splits)


@needs_gxx
@pytest.mark.parametrize(
    "w_layout, splits, gate, bias",
    [("nk", 1, "silu", False), ("kn", 1, "gelu", True), ("nk", 2, "relu", True), ("kn", 1, "silu", False)],
)
def test_gated_products(bias, w_layout, splits, gate, tmp_path):
    given = problem(70, 72, 168, steps=(RESIDUAL,), w_layout=w_layout, gate=gate, gate_bias=bias)
    assert_emulated(gemm_cuda, given, GemmConfig(32, 64, 32, 2, 2, 3, splits), tmp_path, runs=splits)


def test_warps_of_a_gated_product_have_whole_pairs_of_tiles():
    def is_legal(*config):
        return legal(GemmGeometry(problem(64, 256, 64, gate="silu"), GemmConfig(*config)), SHARED_LIMIT)

    assert is_legal(32, 64, 32, 2, 2, 3) and not is_legal(32, 64, 32, 1, 4, 3)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"norm": Norm("layer_norm", 1e-5)}, "a norm, or several matrices"),
        ({"batch": 2}, "a norm, or several matrices"),
        ({"gate": "exp"}, "gate='exp' is not one of"),
        ({"gate": None, "gate_bias": True}, "gate_bias without a gate"),
    ],
)
def test_what_is_no_gated_product(change, why):
    with pytest.raises(StofError, match=re.escape(why)):
        problem(**{"gate": "silu", **change})


def test_tiles_of_a_batch_read_one_matrix_each():
    def is_legal(config=SMALL, m=6 * 39, **rest):
        return legal(GemmGeometry(problem(m, batch=6, matrices=6, **rest), config), SHARED_LIMIT)

    assert is_legal() and is_legal(w_layout="kn", k=160)
    assert not is_legal(w_layout="kn", k=168), "the last block of k would multiply zeros by the next matrix, NaN by NaN"
    assert not is_legal(m=6 * 31) and is_legal(GemmConfig(16, 64, 32, 1, 4, 3), m=6 * 31)


def test_nothing_is_read_in_place_of_rows_past_the_end():
    """A tile at 129 rows read the last one 64 times, as did all CTAs: that was as long as the product itself."""
    text = source(gemm_cuda, problem(129, 128, 128), SMALL)
    copies = [line for line in text.splitlines() if "cp_async_cg" in line and "&(" in line]
    of_a, of_w = ([line for line in copies if f"&({name}_ptr[" in line] for name in "aw")
    assert of_a and of_w and len(of_a) + len(of_w) == len(copies)
    assert all("src_size" in line for line in of_a) and not any("src_size" in line for line in of_w)


def test_what_is_not_supported_says_why():
    def reason(**change):
        return gemm_cuda.unsupported(problem(**change), SM_80)

    assert reason() is None
    assert reason(n=137, steps=(BIAS,)) is None
    assert reason(m=4 * 32, n=137, steps=(BIAS,), batch=4, matrices=2) is None
    for change in ({"w_layout": "kn"}, {"steps": (RESIDUAL,)}, {"norm": Norm("layer_norm", 1e-5)}, {"gate": "silu"}):
        assert "n=137" in reason(n=137, **change) or "norm" in change
    assert "k=4" in reason(k=4)
    assert "whole rows" in reason(norm=Norm("layer_norm", 1e-5))
    assert "2^31" in reason(m=1 << 20, n=1 << 12)
    assert "operands" in reason(steps=(BIAS,) * 7)
    assert "fewer than a tile" in reason(batch=7)
