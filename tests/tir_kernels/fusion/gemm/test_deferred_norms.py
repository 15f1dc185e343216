"""Deferred norms in the CUDA matrix products: their generated CUDA run on the CPU against NumPy."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tir_kernels.fusion.kernels import ctas_of, make_inputs, run_emulated
from tir_kernels.cuda import device
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.gemm.finish.deferred_norm import first_step_operand, statistics_operand
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED
from tir_kernels.fusion.gemm.sizes.cost import plain_product
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry, legal
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference, row_statistics
from tir_kernels.fusion.registry import templates_for
from tir_kernels.target import parse_target

BIAS, GELU, RESIDUAL = Step("add", "row"), Step("gelu"), Step("add", "matrix")
LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5, False, False), Norm("rms_norm", 1e-6, False, False)
SHARED_LIMIT = 232448  # of sm_90a
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def normed(norm) -> Step:
    return Step("add", "normed", norm=norm)


def of_normed(norm, m=70, n=72, k=192, steps=(BIAS, GELU), dtype="float16", **rest) -> GemmProblem:
    """The product of a norm's result."""
    return GemmProblem(m, n, dtype, steps, k=k, a_norm=norm, **rest)


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
    """The kernel's CUDA on the CPU gives the reference's result, and its statistics."""
    g = GemmGeometry(problem, config)
    inputs = inputs_of(problem, mean)
    ctas = ctas_of(g)
    cluster = config.splits if g.in_clusters else 1
    out, *statistics = run_emulated(
        gemm_cuda, problem, config, inputs, ctas, g.threads, g.shared_bytes, folder, runs, cluster
    )
    expected, *expected_statistics = fusion_reference(problem, *(x.double() for x in inputs))
    eps = torch.finfo(getattr(torch, problem.dtype)).eps
    # Where the mean is large, so is what the product has before it is taken away, in float32.
    np.testing.assert_allclose(out, expected, atol=2 * eps + 1e-5 * abs(mean), rtol=eps)
    for one, other in zip(statistics, expected_statistics, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def wgmma(*sizes, **rest) -> GemmConfig:
    return GemmConfig(*sizes, warpgroup=True, **rest)


MMA, MMA_SPLITS = GemmConfig(64, 64, 32, 4, 1, 3), GemmConfig(64, 128, 32, 2, 2, 2, 2)
WGMMA, WGMMA_SPLITS = wgmma(64, 64, 64, 4, 1, 3), wgmma(64, 128, 64, 4, 1, 3, 2)
TMA, TMA_PARTS = (wgmma(*sizes, 64, 4, 1, 3, tma=True) for sizes in ((64, 64), (128, 128)))
TWO_SETS = wgmma(64, 64, 64, 4, 1, 3, tma=True, sets=2)
CLUSTER, CLUSTER_OF_FOUR = (wgmma(64, 64, 64, 4, 1, 3, splits, tma=True) for splits in (2, 4))


@needs_gxx
@pytest.mark.parametrize(
    "config, norm, rest",
    [
        (MMA, LAYER_NORM, {"w_layout": "kn"}),
        (MMA, RMS_NORM, {"k": 64, "dtype": "bfloat16"}),
        (MMA_SPLITS, LAYER_NORM, {"n": 200}),
        (WGMMA, LAYER_NORM, {}),
        (TMA, LAYER_NORM, {"w_layout": "kn", "dtype": "bfloat16"}),
        (TMA_PARTS, LAYER_NORM, {"n": 200, "k": 64}),
        (CLUSTER, RMS_NORM, {"w_layout": "kn"}),
        (CLUSTER_OF_FOUR, LAYER_NORM, {"k": 512, "m": 130}),
    ],
    ids=str,
)
def test_the_product_of_a_norm(config, norm, rest, tmp_path):
    assert_emulated(of_normed(norm, **rest), config, tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "config, norm, rest",
    [
        (MMA, LAYER_NORM, {"dtype": "bfloat16"}),
        (MMA_SPLITS, RMS_NORM, {"w_layout": "kn"}),
        (WGMMA, RMS_NORM, {"n": 320}),
        (WGMMA_SPLITS, LAYER_NORM, {"k": 264}),
        (TMA, LAYER_NORM, {"w_layout": "kn"}),
        (TMA_PARTS, LAYER_NORM, {"n": 192, "dtype": "bfloat16"}),
        (CLUSTER, LAYER_NORM, {"k": 264}),
        (CLUSTER_OF_FOUR, RMS_NORM, {"k": 520, "m": 130, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_a_norm_is_added_and_statistics_are_written(config, norm, rest, tmp_path):
    assert_emulated(with_normed(norm, **rest), config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("config", [TMA, TWO_SETS], ids=["one set", "two sets"])
@pytest.mark.parametrize(
    "given", [of_normed(LAYER_NORM, 200, 264), with_normed(LAYER_NORM, 200, 192)], ids=["of", "with"]
)
def test_what_a_norm_needs_is_read_anew_for_each_tile(given, config, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=1)])
    assert GemmGeometry(given, config).ctas > 4 * ctas_of(GemmGeometry(given, config))
    assert_emulated(given, config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=str)
def test_a_normed_operand_among_others(norm, tmp_path):
    steps = (RESIDUAL, normed(norm), Step("relu"), Step("multiply", "row"))
    assert_emulated(GemmProblem(40, 64, "float16", steps, k=72), MMA, tmp_path)


@needs_gxx
@pytest.mark.parametrize(
    "given",
    [
        of_normed(LAYER_NORM, k=192, steps=(), w_layout="kn"),  # a pair of statistics a load
        of_normed(LAYER_NORM, k=64 * 70, n=64, steps=()),  # two, and several rounds of them
        with_normed(LAYER_NORM),
    ],
    ids=["few", "many", "with"],
)
def test_means_much_larger_than_deviations(given, tmp_path):
    assert_emulated(given, MMA, tmp_path, mean=100.0)


@needs_gxx
def test_splits_in_any_order_give_one_result(tmp_path):
    assert_emulated(with_normed(LAYER_NORM, k=200), MMA_SPLITS, tmp_path, runs=2)


def test_statistics_need_64_columns_in_neighbouring_lanes():
    def is_legal(config, **rest):
        return legal(GemmGeometry(with_normed(LAYER_NORM, 128, 768, 768, **rest), config), SHARED_LIMIT)

    assert is_legal(GemmConfig(64, 128, 64, 2, 2, 3)) and not is_legal(GemmConfig(64, 64, 64, 2, 2, 3))
    assert is_legal(wgmma(128, 192, 64, 8, 1, 3, tma=True)) and not is_legal(wgmma(64, 192, 64, 4, 2, 3, tma=True))
    assert is_legal(wgmma(64, 128, 64, 4, 1, 3, 2, tma=True)) and not is_legal(wgmma(64, 96, 64, 4, 1, 3, 2, tma=True))
    given = of_normed(LAYER_NORM, 128, 768, 768)
    assert legal(GemmGeometry(given, GemmConfig(64, 64, 64, 2, 2, 3)), SHARED_LIMIT)  # written they are not here


def test_sums_of_splits_leave_fewer_registers():
    given, config = with_normed(LAYER_NORM, 128, 768, 768), GemmConfig(128, 128, 64, 2, 2, 3, 2)
    configs = [gemm_cuda.configs(p, parse_target("cuda -arch=sm_80")) for p in (given, plain_product(given))]
    assert [config in found for found in configs] == [False, True]


def test_a_pair_for_each_row_and_the_vectors_need_shared_memory():
    plain = GemmGeometry(of_normed(RMS_NORM), TWO_SETS)
    assert plain.shared_bytes - plain.row_norm_offset == 2 * 64 * 8
    with_columns = GemmGeometry(of_normed(LAYER_NORM), TWO_SETS)
    assert with_columns.row_norm_bytes - plain.row_norm_bytes == 2 * 64 * 4
    cluster = GemmGeometry(with_normed(LAYER_NORM), CLUSTER)
    assert cluster.row_norm_bytes == 2 * 64 * 4 + 32 * 8


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("m", [128, 1024, 32768])
@pytest.mark.parametrize("given", [of_normed, with_normed], ids=["of", "with"])
def test_configurations_are_some_of_the_plain_product(given, m, arch):
    target = parse_target(f"cuda -arch={arch}")
    problem = given(LAYER_NORM, m, 768, 768)
    found, plain = (gemm_cuda.configs(p, target) for p in (problem, plain_product(problem)))
    assert set(found) <= set(plain) and len(found) > 50 and found[0] in MEASURED
    extra = [
        gemm_cuda.predict_us(problem, c, target) - gemm_cuda.predict_us(plain_product(problem), c, target)
        for c in found
    ]
    assert min(extra) > 0


def test_places_of_operands():
    assert statistics_operand(of_normed(LAYER_NORM)) == 0 and first_step_operand(of_normed(LAYER_NORM)) == 2
    assert first_step_operand(of_normed(RMS_NORM)) == 1 and first_step_operand(with_normed(RMS_NORM)) == 0
    assert statistics_operand(with_normed(RMS_NORM)) == 2


def test_other_kernels_refuse():
    target = parse_target("cuda -arch=sm_90a")
    for problem in (of_normed(LAYER_NORM, 16, 64, 64), with_normed(RMS_NORM, 16)):
        assert gemm_cuda.unsupported(problem, target) is None
        assert "statistics" in gemv_cuda.unsupported(problem, target)
        refusals = [t.unsupported(problem, target) for t in templates_for(target) if t is not gemm_cuda]
        assert all(refusals)
    with_both = replace(of_normed(LAYER_NORM), norm=LAYER_NORM)
    assert "statistics" in gemm_norm_cuda.unsupported(with_both, target)
