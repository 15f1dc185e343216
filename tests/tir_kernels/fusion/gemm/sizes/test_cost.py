"""The model of time orders what was measured on an H200, and never proposes what was not."""

import pytest

from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemm_norm as gemm_norm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED
from tir_kernels.fusion.problem import GemmProblem, Norm, Step
from tir_kernels.target import parse_target

SM_80, SM_90, SM_90A = (parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90", "sm_90a"))
STEPS = (Step("add", "row"), Step("gelu"))
# m, n, k, configuration and microseconds of bias and gelu on an H200; of each problem a fast one and a slow one.
TIMES = [
    (128, 3072, 768, (64, 64, 64, 2, 2, 12), 5.06),
    (128, 3072, 768, (32, 128, 64, 1, 4, 4, 4), 10.2),
    (128, 768, 3072, (32, 64, 64, 1, 4, 4, 4), 7.72),
    (128, 768, 3072, (64, 128, 64, 2, 4, 4), 20.98),
    (2048, 4096, 1024, (128, 256, 64, 2, 4, 3), 44.90),
    (4096, 1024, 4096, (128, 256, 64, 2, 4, 3), 80.95),
    (32768, 3072, 768, (128, 256, 64, 2, 4, 3), 437.5),
]


# The same of wgmma; before the time, whether the tensor memory accelerator copies, and the sets of warps.
WGMMA_TIMES = [
    (128, 3072, 768, (64, 64, 64, 4, 1, 12), False, 1, 4.07),
    (128, 768, 3072, (64, 64, 64, 4, 1, 6, 4), False, 1, 7.06),
    (128, 768, 3072, (64, 64, 64, 4, 1, 6, 2), False, 1, 9.17),
    (512, 4096, 1024, (128, 128, 64, 8, 1, 6), True, 1, 9.60),
    (512, 4096, 1024, (64, 64, 64, 4, 1, 12), True, 1, 15.25),
    (2048, 3072, 768, (128, 128, 64, 4, 1, 6), True, 2, 19.06),
    (4096, 4096, 1024, (256, 128, 64, 8, 1, 4), True, 1, 63.6),
    (4096, 11008, 4096, (64, 256, 64, 4, 2, 5), True, 1, 567.9),
]


def problem(m, n, k, steps=STEPS, **rest):
    return GemmProblem(m, n, "float16", steps, k=k, **rest)


@pytest.mark.parametrize("m, n, k, sizes, measured", TIMES)
def test_predictions_are_within_a_fifth_of_measurements(m, n, k, sizes, measured):
    predicted = gemm_cuda.predict_us(problem(m, n, k), GemmConfig(*sizes), SM_90)
    assert measured / 1.2 < predicted < measured * 1.2


@pytest.mark.parametrize("m, n, k, sizes, tma, sets, measured", WGMMA_TIMES)
def test_predictions_of_wgmma_are_within_a_quarter(m, n, k, sizes, tma, sets, measured):
    config = GemmConfig(*sizes, warpgroup=True, tma=tma, sets=sets)
    assert measured / 1.25 < gemm_cuda.predict_us(problem(m, n, k), config, SM_90A) < measured * 1.25


@pytest.mark.parametrize("m, n, k", [(128, 3072, 768), (512, 768, 3072), (2048, 4096, 1024), (4096, 11008, 4096)])
def test_the_default_multiplies_by_wgmma_where_the_gpu_has_it(m, n, k):
    given = problem(m, n, k)
    assert gemm_cuda.configs(given, SM_90A)[0].warpgroup
    assert not gemm_cuda.configs(given, SM_90)[0].warpgroup


@pytest.mark.parametrize("target", [SM_80, SM_90, SM_90A], ids=["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("m, n, k", [(17, 768, 768), (128, 768, 3072), (512, 4096, 1024), (4096, 11008, 4096)])
def test_the_default_was_measured_and_is_the_fastest_of_those_predicted(m, n, k, target):
    given = problem(m, n, k)
    configs = gemm_cuda.configs(given, target)
    measured = [c for c in configs if c in MEASURED]
    assert configs[: len(measured)] == measured
    assert len(configs) == len(set(configs))
    times = [gemm_cuda.predict_us(given, c, target) for c in measured]
    assert times == sorted(times)


def test_a_few_rows_split_k_and_many_do_not():
    assert gemm_cuda.configs(problem(128, 768, 3072), SM_90)[0].splits > 1
    assert gemm_cuda.configs(problem(4096, 4096, 1024), SM_90)[0].splits == 1


def test_a_norm_costs_more_than_none_and_taller_tiles_more():
    norm = Norm("layer_norm", 1e-5)
    tall, low = GemmConfig(96, 128, 64, 2, 2, 3), GemmConfig(16, 128, 64, 1, 4, 4)

    def second_phase(config):
        with_norm = gemm_norm_cuda.predict_us(problem(2048, 768, 768, norm=norm), config, SM_90)
        return with_norm - gemm_cuda.predict_us(problem(2048, 768, 768), config, SM_90)

    assert second_phase(tall) > second_phase(low) > 0


@pytest.mark.parametrize(
    "m, n, k, measured", [(1, 11008, 4096, 23.67), (8, 4096, 4096, 11.41), (16, 4096, 11008, 27.72)]
)
def test_decoding_is_predicted_from_its_bytes(m, n, k, measured):
    given = problem(m, n, k)
    predicted = gemv_cuda.predict_us(given, gemv_cuda.configs(given, SM_90)[0], SM_90)
    assert measured / 1.2 < predicted < measured * 1.2


def test_every_split_has_work():
    for m, n, k in ((16, 64, 8), (128, 768, 3072), (33, 520, 2056)):
        for config in gemm_cuda.configs(problem(m, n, k), SM_90):
            blocks = -(-k // config.block_k)
            assert (config.splits - 1) * -(-blocks // config.splits) < blocks
