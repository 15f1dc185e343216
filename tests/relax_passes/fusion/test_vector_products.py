"""Products of a matrix and a vector for each element of a batch become sums; other products stay."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import stof_tvm
from relax_passes.fusion.vector_products import VectorProducts
from relax_passes.ir.bindings import Bindings, operator
from tests.relax_passes.fusion.modules import inputs_of, module_of, run

op = relax.op


def module(a, b, dtype="float32", body=None):
    """A module of two inputs of these shapes, which is their product."""
    x, y = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in (("a", a), ("b", b)))
    body = body or (lambda emit, x, y: emit(op.matmul(x, y)))
    return module_of([x, y], lambda builder: body(builder.emit, x, y))


def names(mod) -> list[str]:
    return [name for value in Bindings(mod["main"]).values.values() if (name := operator(value))]


CASES = {
    "one column": ((24, 16, 9), (24, 9, 1)),
    "one row": ((6, 1, 7), (6, 7, 5)),
    "one number": ((3, 1, 11), (3, 11, 1)),
    "several axes of a batch": ((2, 3, 4, 5), (2, 3, 5, 1)),
    "one matrix for several vectors": ((1, 4, 5), (3, 5, 1)),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_are_sums(name, dtype):
    before = module(*CASES[name], dtype)
    after = VectorProducts()(before)
    casts = ["astype"] * (dtype == "float16")
    assert names(after) == ["permute_dims", *casts * 2, "multiply", "sum", *casts]
    a, b = (x.astype(dtype) for x in inputs_of(before))
    (out,) = run(after, a, b)
    expected = a.astype("float64") @ b.astype("float64")
    assert out.shape == expected.shape and out.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


NEAR_MISSES = {
    "two columns": ((24, 16, 9), (24, 9, 2)),
    "one vector for all": ((24, 16, 9), (1, 9, 1)),
    "one matrix": ((1, 16, 9), (1, 9, 1)),
    "no batch": ((16, 9), (9, 1)),
    "a vector without axes of a batch": ((24, 16, 9), (9, 1)),
    "no elements": ((0, 16, 9), (0, 9, 1)),
    "an empty sum": ((24, 16, 0), (24, 0, 1)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_products_stay(name):
    mod = module(*NEAR_MISSES[name])
    tvm.ir.assert_structural_equal(VectorProducts()(mod), mod)


def test_products_of_other_dtypes_and_of_weights_and_large_ones_stay():
    weight = relax.const(np.ones((24, 9, 1), "float32"))
    for mod in (
        module((24, 16, 9), (24, 9, 1), "int32"),
        module((24, 16, 9), (24, 9, 1), "float64"),
        module((24, 16, 9), (24, 9, 1), body=lambda emit, x, y: emit(op.matmul(x, weight))),
        module((1 << 16, 1 << 12, 8), (1 << 16, 8, 1), "float16"),
        module((tvm.tirx.Var("n", "int64"), 16, 9), (24, 9, 1)),
    ):
        tvm.ir.assert_structural_equal(VectorProducts()(mod), mod)


class WeightedWindows(torch.nn.Module):
    """ConvBERT's: each token and head has a kernel of its own over the tokens around it."""

    def forward(self, x, kernels):
        batch, length, width = x.shape
        columns = torch.nn.functional.unfold(x.transpose(1, 2).unsqueeze(-1), [9, 1], padding=[4, 0])
        windows = columns.transpose(1, 2).reshape(-1, width // 2, 9)
        weights = torch.softmax(kernels.reshape(-1, 9, 1), dim=1)
        return (windows @ weights).reshape(batch, length, width)


def test_windows_that_are_weighted_are_one_group():
    x, kernels = torch.randn(2, 64, 32).half(), torch.randn(2, 64, 2, 9).half()
    engine = stof_tvm.build(WeightedWindows(), "cuda -arch=sm_90a", (x, kernels), tuning_logs=False, verify=False)
    found = [(segment.kernel, "sum" in segment.operators) for segment in engine.report().segments]
    assert ("group", True) in found and not any("matmul" in segment.operators for segment in engine.report().segments)


def test_windows_that_are_weighted_stay_products_on_cpus():
    x, kernels = torch.randn(2, 64, 32), torch.randn(2, 64, 2, 9)
    engine = stof_tvm.build(WeightedWindows(), "llvm", (x, kernels), tuning_logs=False, verify=False)
    operators = {name for segment in engine.report().segments for name in segment.operators}
    assert "matmul" in operators and "sum" not in operators
    torch.testing.assert_close(engine(x, kernels), WeightedWindows()(x, kernels), rtol=1e-5, atol=1e-5)
