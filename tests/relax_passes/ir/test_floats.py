"""Which casts keep what a number was computed with, and that the simplifier leaves opaque numbers alone."""

import pytest
import tvm
from tvm import tirx

from relax_passes.ir.floats import FLOATS, keeps_precision, opaque


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_dtype_keeps_itself_and_what_is_narrower_in_both_ways(dtype):
    kept = {source_dtype for source_dtype in FLOATS if keeps_precision(dtype, source_dtype)}
    assert (
        kept
        == {
            "bfloat16": {"bfloat16"},
            "float16": {"float16"},
            "float32": {"bfloat16", "float16", "float32"},
            "float64": {*FLOATS},
        }[dtype]
    )


def test_what_is_no_float_keeps_nothing():
    assert not keeps_precision("int32", "int32") and not keeps_precision("float32", "int8")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_difference_of_an_opaque_number_is_not_simplified(dtype):
    x = tirx.Var("x", dtype)
    assert isinstance(tvm.sym.Analyzer().simplify(x - x), tirx.FloatImm)
    assert isinstance(tvm.sym.Analyzer().simplify(opaque(x) - x), tirx.Sub)
