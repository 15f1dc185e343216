"""Closed expressions have the values that their operators give; equal ones share one array."""

import ml_dtypes
import numpy as np
import pytest
from tvm import relax

from relax_passes.ir.bindings import Bindings
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.legalizations.closed_values import closed_values


def test_values_of_expressions_that_depend_on_constants_only():
    x = relax.Var("x", relax.TensorType((3,), "bfloat16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            ramp = builder.emit(relax.op.arange(0, 3, 1, "float32"))
            halves = builder.emit(relax.op.astype(relax.op.multiply(ramp, relax.const(0.5)), "bfloat16"))
            again = builder.emit(relax.op.astype(relax.op.multiply(ramp, relax.const(0.5)), "bfloat16"))
            output = builder.emit_output(relax.op.add(x, halves))
        builder.emit_func_output(output)
    bindings = Bindings(builder.finalize()["main"])
    closed = [var for var in bindings.values if ClosedExpressions(bindings).is_closed(var)]
    assert output not in closed and {halves, again} <= {*closed}
    first, second, constant = closed_values(bindings, [halves, again, relax.const(np.float32([1, 2]))])
    assert first.dtype == np.float32 and first.tolist() == [0, 0.5, 1] and constant.tolist() == [1, 2]
    assert np.shares_memory(first, second)


def product_of(a, b) -> np.ndarray:
    """a @ b of constants, as an expression of a function."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            output = builder.emit_output(relax.op.matmul(*(relax.const(x, x.dtype.name) for x in (a, b))))
        builder.emit_func_output(output)
    bindings = Bindings(builder.finalize()["main"])
    (found,) = closed_values(bindings, [next(iter(bindings.values))])
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (2, 4, 5)), ((4,), (4, 5))])
def test_products_of_constants(dtype, shapes):
    rng = np.random.default_rng(0)
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in shapes)
    found = product_of(a, b)
    assert found.dtype == (np.float32 if dtype.name == "bfloat16" else dtype)
    np.testing.assert_array_equal(found.astype("float64"), np.matmul(a.astype("float64"), b.astype("float64")))


def test_products_in_half_precision_are_summed_in_float32():
    """4096 + 1 + ... is 4096 where each sum is rounded to a half."""
    a = np.array([[4096.0] + [1.0] * 512], "float16")
    assert product_of(a, np.ones((513, 1), "float16")).item() == 4608
