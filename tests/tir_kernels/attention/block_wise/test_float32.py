"""float32 attention on a GPU: the generated CUDA of the block-wise and row-wise kernels run on the CPU."""

import re
import shutil

import numpy as np
import pytest
import torch

from tests.gpu.attention_cases import dense_mask, packed_views
from tests.tir_kernels.attention.float32 import TARGET, assert_emulated, emulated, expected, make_inputs, problem
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.problem import Layouts
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.kernel import Config as RowWiseConfig
from tir_kernels.attention.select import choose
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.cuda.float32.modes import MODES
from tir_kernels.errors import InputError
from tir_kernels.target import parse_target

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
SMALL = BlockWiseConfig(64, 32, 4, 2)


@needs_gxx
@pytest.mark.parametrize(
    "name, given, config, mode",
    [
        ("random", problem(50, 70, dim=32), SMALL, "ieee"),
        ("random", problem(50, 70, dim=32), SMALL, "tf32"),
        ("empty-rows", problem(100, 90, dim=16), BlockWiseConfig(64, 64, 2, 2), "tf32"),
        ("causal", problem(65, dim=40, v_dim=24), BlockWiseConfig(32, 32, 2, 3), "ieee"),
        ("longformer", problem(33, 600, dim=32), BlockWiseConfig(16, 32, 1, 1), "tf32"),
        ("longformer", problem(33, 600, dim=32), BlockWiseConfig(16, 32, 1, 1), "ieee"),
    ],
)
def test_masks_and_shapes(name, given, config, mode, tmp_path):
    given = problem(given.q_len, given.kv_len, given.head_dim, given.v_head_dim, float32=mode)
    keep = dense_mask(name, given.q_len, given.kv_len)
    assert_emulated(block_wise_cuda, given, config, keep, tmp_path)


VARIANTS = {
    "grouped heads, a mask for each": (problem(40, 70, dim=16, heads=4, kv_heads=2), 4),
    "bias and log-sum-exp": (problem(40, 70, dim=16, heads=2, bias_shape=(1, 2, 40, 70), gives_lse=True), 1),
    "a part continued": (problem(40, 70, dim=16, continues=True, gives_lse=True), 1),
    "softcap and sink": (problem(40, 70, dim=16, softcap=2.0, scale=1.0, sink_dtype="float32"), 1),
    "packed views": (problem(40, dim=20, heads=2, layouts=packed_views(1, 40, 2, 2, 20)), 1),
    "layouts": (problem(40, 70, dim=24, batch=2, heads=2, layouts=Layouts("bshd", "bhsd", "sbhd", "bshd")), 1),
    "scale below zero": (problem(40, 70, dim=16, scale=-0.3), 1),
}


@needs_gxx
@pytest.mark.parametrize("name", VARIANTS)
def test_what_else_an_attention_has(name, tmp_path):
    given, heads = VARIANTS[name]
    keep = np.stack([dense_mask("random", given.q_len, given.kv_len, seed) for seed in range(heads)])
    assert_emulated(block_wise_cuda, given, SMALL, keep if heads > 1 else keep[0], tmp_path)


@needs_gxx
def test_heads_of_136_and_one_warp_with_more_chunks_than_lanes(tmp_path):
    keep = dense_mask("window", 20, 40)
    assert_emulated(block_wise_cuda, problem(20, 40, dim=136), BlockWiseConfig(16, 32, 1, 1), keep, tmp_path)


@needs_gxx
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [16, 136])
def test_decoding(dim, mode, tmp_path):
    given = problem(1, 300, dim=dim, heads=4, kv_heads=2, float32=mode, gives_lse=True)
    keep = np.random.default_rng(0).random((4, 1, 300)) < 0.4
    assert_emulated(row_wise_cuda, given, RowWiseConfig(2, 2), keep, tmp_path)


@needs_gxx
def test_values_that_are_infinite_or_the_largest(tmp_path):
    """What stands in rows that nothing else reaches: as PyTorch has it, or NaN in both."""
    given = problem(32, dim=8)
    q, k, v = make_inputs(given)
    largest = torch.finfo(torch.float32).max
    v[0, 0, 3, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38])
    k[0, 0, 7] = 1e30
    q[0, 0, 9, 0] = -largest / 4
    keep = np.eye(32, dtype=bool)
    (actual,) = emulated(block_wise_cuda, given, SMALL, keep, [q, k, v], tmp_path)
    (exact,) = expected(given, keep, [q, k, v], torch.float32)
    # Other rows have weights of 0 for key 3, and 0 times infinity: those of its block are NaN in both of the columns.
    row = torch.tensor([3])
    torch.testing.assert_close(actual[0, 0, row], exact[0, 0, row], rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dim": 18}, "head_dim=18 must be a multiple of 4"),
        ({"v_dim": 6}, "v_head_dim=6 must be a multiple of 4"),
    ],
)
def test_unsupported_problems_name_value_and_rule(changes, words):
    for template in (block_wise_cuda, row_wise_cuda):
        assert re.search(words, template.unsupported(problem(1, 300, **changes), TARGET))


@pytest.mark.parametrize("dim", [4, 8, 20, 64, 128, 200, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_every_multiple_of_4_up_to_256_is_supported(dim, arch):
    target = parse_target(f"cuda -arch={arch}")
    for mode in MODES:
        assert block_wise_cuda.unsupported(problem(300, dim=dim, float32=mode), target) is None
        if dim <= 128 or arch != "sm_86":  # whose shared memory holds too few tokens of larger heads
            assert row_wise_cuda.unsupported(problem(1, 300, dim=dim, float32=mode), target) is None
        assert not any(c.warpgroup for c in block_wise_cuda.configs(problem(300, dim=dim, float32=mode), target))


def test_one_stage_is_for_one_warp_where_products_are_exact():
    """ptxas spills registers of the others."""
    for dim in (64, 256):
        configs = {mode: block_wise_cuda.configs(problem(300, dim=dim, float32=mode), TARGET) for mode in MODES}
        assert {c.warps for c in configs["ieee"] if c.stages == 1} == {1}
        assert {c.warps for c in configs["tf32"] if c.stages == 1} > {1}


def test_the_kernel_of_hopper_alone_takes_16_bits():
    assert "got float32" in specialized.unsupported(problem(300, dim=64), TARGET)


def test_tf32_is_predicted_to_be_faster_than_ieee_and_slower_than_16_bits():
    from dataclasses import replace

    given = problem(2048, heads=12)
    half = replace(given, dtype="float16")
    times = [choose(x, None, TARGET, "block-wise").predicted_us for x in (half, replace(given, float32="tf32"), given)]
    assert times[0] < times[1] < times[2]


def test_decoding_goes_row_wise_and_long_inputs_block_wise():
    assert choose(problem(1, 4096, heads=8), None, TARGET).template is row_wise_cuda
    assert choose(problem(2048, heads=8), None, TARGET).template is block_wise_cuda


def test_a_mode_belongs_to_float32():
    with pytest.raises(InputError, match="float32='fast' is not one of 'ieee', 'tf32'"):
        problem(8, float32="fast")
