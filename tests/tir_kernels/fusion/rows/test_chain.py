"""The CUDA kernel of elementwise chains: its generated CUDA run on the CPU against PyTorch."""

import math

import pytest
import torch

from tests.tir_kernels.fusion.row_emulation import RowCase, assert_right, emulate, needs_gxx
from tir_kernels.fusion.problem import ACTIVATIONS, GemmProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows import chain as row_chain_cuda
from tir_kernels.fusion.rows.chain import ChainConfig
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
SILU = Step("silu")


def problem(m=7, n=776, dtype="float16", steps=(SILU, GATE)):
    return RowProblem(m, n, dtype, tuple(steps))


def check(given, config, folder):
    vectors = given.m * given.n // 8
    ctas = -(-vectors // (config.threads * config.vectors_per_thread))
    assert_right(RowCase(given, config), ctas, config.threads, 0, folder)


@needs_gxx
@pytest.mark.parametrize("config", row_chain_cuda.configs(problem(), SM_80), ids=lambda config: config.label)
@pytest.mark.parametrize("m, n", [(7, 776), (8, 1024)], ids=["ragged", "whole"])
def test_every_configuration(m, n, config, tmp_path):
    check(problem(m, n), config, tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(dtype, tmp_path):
    check(problem(5, 72, dtype, (BIAS, Step("relu"), RESIDUAL)), ChainConfig(128, 2), tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind, dtype, tmp_path):
    check(problem(3, 64, dtype, (Step("scale", value=0.3), Step(kind))), ChainConfig(128, 1), tmp_path)


@needs_gxx
def test_a_clip_holds_infinities_and_leaves_nan(tmp_path):
    clipped = problem(2, 64, steps=(Step("clip", value=65504.0),))
    x = torch.linspace(-60000, 60000, 128).reshape(2, 64).half()
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    (out,) = emulate(RowCase(clipped, ChainConfig(128, 1)), [x], 1, 128, 0, tmp_path)
    expected = x.double()
    expected[0, :2] = torch.tensor([65504.0, -65504.0])
    torch.testing.assert_close(out, expected, atol=0, rtol=0, equal_nan=True)


def test_what_is_not_supported_says_why():
    def reason(**change):
        return row_chain_cuda.unsupported(problem(**change), SM_80)

    assert reason() is None and reason(n=1 << 20) is None
    assert "n=12" in reason(n=12)
    assert "2^31" in reason(m=1 << 22)
    assert "operands" in reason(steps=(BIAS,) * 7)
    assert "whole rows" in row_chain_cuda.unsupported(RowProblem(1, 8, "float16", (), Norm("rms_norm", 0.0)), SM_80)
    assert "chain" in row_chain_cuda.unsupported(GemmProblem(1, 8, "float16", k=8), SM_80)
