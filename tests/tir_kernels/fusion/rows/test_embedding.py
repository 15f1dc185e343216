"""The CUDA embedding kernel: its generated CUDA run on the CPU against PyTorch."""

import pytest
import torch

from tests.tir_kernels.fusion.row_emulation import (
    RowCase,
    assert_right,
    emulate,
    needs_gxx,
)
from tir_kernels.errors import InputError
from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.rows import embedding as row_embedding_cuda
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.geometry import RowConfig, RowGeometry
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
LAYER_NORM = Norm("layer_norm", 1e-5)
TABLES = (Table(50), Table(20, 3), Table(2))


def problem(m=6, n=264, dtype="float16", tables=TABLES, **rest):
    return EmbeddingProblem(m, n, dtype, tables, **rest)


def check(given, config, folder):
    g = RowGeometry(given.m, given.n, config)
    assert_right(RowCase(given, config), g.ctas, g.threads, g.shared_bytes, folder)


@needs_gxx
@pytest.mark.parametrize("tables", [TABLES, TABLES[:2], TABLES[1:2], TABLES[:1]], ids=len)
@pytest.mark.parametrize("norm", [LAYER_NORM, None], ids=["layer_norm", "sum"])
def test_tables_with_indices_of_their_own_or_that_come_again(tables, norm, tmp_path):
    check(problem(tables=tables, norm=norm, keeps_sum=norm is not None), RowConfig(32, 4), tmp_path)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_dtypes(dtype, index_dtype, tmp_path):
    given = problem(dtype=dtype, index_dtype=index_dtype, norm=Norm("rms_norm", 1e-6, bias=False))
    check(given, RowConfig(64, 1), tmp_path)


@needs_gxx
@pytest.mark.parametrize("index_dtype, outside", [("int32", [-1, 50]), ("int64", [-1, 50, 2**32 + 1])])
def test_an_index_outside_its_table_gives_nan_and_reads_nothing(index_dtype, outside, tmp_path):
    given, config = problem(n=64, tables=TABLES[:1], norm=LAYER_NORM, index_dtype=index_dtype), RowConfig(32, 4)
    g = RowGeometry(given.m, given.n, config)
    index, table, *rest = RowCase(given, config).make_inputs(0, "cpu")
    index[: len(outside)] = torch.tensor(outside)
    (out,) = emulate(RowCase(given, config), [index, table, *rest], g.ctas, g.threads, g.shared_bytes, tmp_path)
    assert out[: len(outside)].isnan().all() and out[len(outside) :].isfinite().all()


def test_what_is_not_supported_says_why():
    assert row_embedding_cuda.unsupported(problem(), SM_80) is None
    assert "n=12" in row_embedding_cuda.unsupported(problem(n=12), SM_80)
    assert "4 tables" in row_embedding_cuda.unsupported(problem(tables=(Table(9),) * 4), SM_80)
    assert "2^31" in row_embedding_cuda.unsupported(problem(n=8192, tables=(Table(1 << 18),)), SM_80)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="period=4 must divide m=6"):
        problem(tables=(Table(20, 4),))
    with pytest.raises(InputError, match="index_dtype='uint8'"):
        problem(index_dtype="uint8")
    with pytest.raises(InputError, match="tables"):
        problem(tables=())
