"""The CUDA rotary kernel: its generated CUDA run on the CPU against PyTorch."""

import pytest

from tests.tir_kernels.fusion.row_emulation import (
    RowCase,
    assert_right,
    needs_gxx,
)
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.rows import rotary as row_rotary_cuda
from tir_kernels.fusion.rows.rotary import RotaryConfig, RotaryProblem
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")


def problem(heads=4, kv_heads=2, head_dim=64, dtype="float16", **rest):
    return RotaryProblem(2, 5, heads, kv_heads, head_dim, dtype, **rest)


def check(given, config, folder):
    slots = -(-(given.heads + given.kv_heads) // config.heads_per_thread)
    items = given.batch * given.length * slots * given.head_dim // 16
    assert_right(RowCase(given, config), -(-items // config.threads), config.threads, 0, folder)


@needs_gxx
@pytest.mark.parametrize("packed_heads", [None, 6, 8])
@pytest.mark.parametrize("out_layout", ["bshd", "bhsd"])
def test_sources_and_layouts(packed_heads, out_layout, tmp_path):
    check(problem(packed_heads=packed_heads, out_layout=out_layout), RotaryConfig(128, 2), tmp_path)


@needs_gxx
@pytest.mark.parametrize("heads_per_thread", [1, 2, 4])
def test_heads_that_do_not_divide(heads_per_thread, tmp_path):
    check(problem(5, 2, 48, table_batch=2), RotaryConfig(128, heads_per_thread), tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
def test_dtypes(dtype, table_dtype, tmp_path):
    check(problem(dtype=dtype, table_dtype=table_dtype), RotaryConfig(128, 2), tmp_path)


def test_what_is_not_supported_says_why():
    assert row_rotary_cuda.unsupported(problem(), SM_80) is None
    assert "head_dim=40" in row_rotary_cuda.unsupported(problem(head_dim=40), SM_80)
    huge = RotaryProblem(64, 1 << 16, 8, 8, 128, "float16")
    assert "2^31" in row_rotary_cuda.unsupported(huge, SM_80)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="packed_heads=5 holds fewer than 4 \\+ 2"):
        problem(packed_heads=5)
    with pytest.raises(InputError, match="table_batch=3"):
        problem(table_batch=3)
    with pytest.raises(InputError, match="out_layout='sbhd'"):
        problem(out_layout="sbhd")
    with pytest.raises(UnsupportedError, match="float64"):
        problem(dtype="float64")
