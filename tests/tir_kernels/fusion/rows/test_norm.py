"""The CUDA norm kernel: its generated CUDA run on the CPU against PyTorch."""

import pytest

from tests.tir_kernels.fusion.row_emulation import (
    RowCase,
    assert_right,
    needs_gxx,
)
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.fusion.rows.geometry import RowConfig, RowGeometry
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5), Norm("rms_norm", 1e-6, bias=False)


def problem(m=5, n=768, dtype="float16", steps=(BIAS, RESIDUAL), norm=LAYER_NORM, keeps_sum=False):
    return RowProblem(m, n, dtype, tuple(steps), norm, keeps_sum)


def check(given, config, folder):
    g = RowGeometry(given.m, given.n, config)
    assert_right(RowCase(given, config), g.ctas, g.threads, g.shared_bytes, folder)


@needs_gxx
@pytest.mark.parametrize(
    "n, config",
    [
        (768, RowConfig(32, 4)),
        (768, RowConfig(96, 1)),
        (776, RowConfig(64, 2)),  # the last vectors of some threads of both warps lie past the end
        (776, RowConfig(128, 1)),  # the last warp has a single vector
        (72, RowConfig(8, 16)),
        (8, RowConfig(1, 128)),
        (2056, RowConfig(96, 2)),
    ],
    ids=lambda x: getattr(x, "label", x),
)
@pytest.mark.parametrize("norm", [LAYER_NORM, RMS_NORM], ids=lambda norm: norm.kind)
def test_ways_to_deal_out_a_row(n, config, norm, tmp_path):
    check(problem(7, n, norm=norm), config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("weight, bias", [(True, True), (True, False), (False, True), (False, False)])
def test_dtypes_with_a_sum_that_is_kept(dtype, weight, bias, tmp_path):
    given = problem(3, 520, dtype, (RESIDUAL,), Norm("layer_norm", 1e-5, weight, bias), keeps_sum=True)
    check(given, RowConfig(32, 2), tmp_path)


@needs_gxx
def test_steps_of_every_sort(tmp_path):
    check(problem(3, 264, steps=(BIAS, Step("silu"), GATE, Step("scale", value=0.5))), RowConfig(32, 4), tmp_path)


def test_what_is_not_supported_says_why():
    def reason(**change):
        return row_norm_cuda.unsupported(problem(**change), SM_80)

    assert reason() is None and reason(n=32768) is None
    assert "n=770" in reason(n=770)
    assert "n=32776" in reason(n=32776)
    assert "2^31" in reason(m=1 << 22)
    assert "no norm" in reason(norm=None)
    assert "operands" in reason(steps=(BIAS,) * 5)
    assert "matrix" in row_norm_cuda.unsupported(GemmProblem(1, 8, "float16", norm=LAYER_NORM, k=8), SM_80)
