"""Predicted time of two products in one kernel: proposed where the first is narrow, left alone where it is wide."""

import pytest

from tests.tir_kernels.fusion.kernels import mlp
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.mlp.cost import mlp_bytes
from tir_kernels.target import parse_target

SM_80, SM_90A = (parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90a"))


def us(template, problem, target) -> float:
    """Predicted time of the default configuration."""
    return template.predict_us(problem, template.configs(problem, target)[0], target)


def gain(problem, target) -> float:
    """Predicted time of two kernels over that of one."""
    return sum(us(gemm_cuda, one, target) for one in (problem.first, problem.second)) / us(mlp_cuda, problem, target)


@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=["sm_80", "sm_90a"])
def test_one_kernel_pays_where_the_first_product_is_narrow(target):
    adapters = [mlp(m, 768, 64, 768) for m in (128, 512)]
    assert all(gain(problem, target) > 1.05 for problem in adapters)
    assert gain(mlp(512, 768, 512, 768), target) < 1
    gains = [gain(mlp(512, 768, inner, 768), target) for inner in (64, 128, 256, 512)]
    assert gains == sorted(gains, reverse=True)


def test_few_rows_are_cut_into_parts_and_many_are_not():
    def parts(m):
        return mlp_cuda.configs(mlp(m, 768, 64, 768), SM_80)[0].parts

    assert parts(128) > 1 and parts(32768) == 1


def test_the_first_configuration_is_the_fastest_as_predicted():
    problem = mlp(2048, 768, 64, 768)
    times = [mlp_cuda.predict_us(problem, config, SM_80) for config in mlp_cuda.configs(problem, SM_80)]
    assert times == sorted(times) and times[0] > 0


def test_what_lies_between_the_products_is_no_traffic():
    problem = mlp(100, 32, 16, 24)
    assert mlp_bytes(problem) == 2 * (100 * 32 + 16 * 32 + 16 + 24 * 16 + 24 + 2 * 100 * 24)


def test_an_h200_has_one_kernel_where_that_was_the_faster():
    """As measured: 1.26× to 1.04× at an inner width of 64 and up to 2048 rows, 0.91× and less at 128 and more."""
    faster = [mlp(m, 768, 64, 768) for m in (128, 512, 2048)]
    slower = [mlp(m, *sizes) for m in (128, 512, 2048, 4096) for sizes in ((1024, 128, 1024), (256, 512, 256))]
    assert [gain(problem, SM_90A) > 1 for problem in (*faster, *slower)] == [True] * 3 + [False] * 8
