"""exp, tanh, sigmoid, erf and powers without libm: accuracy over the whole range, special values, all float types."""

import numpy as np
import pytest
import torch
import tvm
from tvm import s_tir, te, tirx

from relax_passes.schedule.cpu_rules.vector_math import expand_math
from relax_passes.schedule.cpu_rules.widen_bf16 import widen_bf16
from tir_kernels.target import parse_target

SIZE = 1 << 14
FUNCTIONS = {
    "exp": (tirx.exp, torch.exp),
    "tanh": (tirx.tanh, torch.tanh),
    "sigmoid": (tirx.sigmoid, torch.sigmoid),
    "sinh": (tirx.sinh, torch.sinh),
    "erf": (tirx.erf, torch.erf),
    "cube": (lambda x: tirx.pow(x, tirx.const(3.0, str(x.dtype))), lambda x: x**3),
}
RANGES = [(-110, 90), (-12, 12), (-1, 1), (-1e-3, 1e-3)]


def build(function, size, dtype="float32"):
    """A vectorised elementwise kernel of the function, expanded; and its LLVM text."""
    x = te.placeholder((size,), dtype, name="x")
    y = te.compute((size,), lambda i: function(x[i]), name="y")
    sch = s_tir.Schedule(te.create_prim_func([x, y]))
    sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 16])[1])
    func = expand_math(widen_bf16(sch.mod["main"]))
    executable = tvm.compile(tvm.IRModule({"main": func}), target=parse_target("llvm"))
    return executable["main"], executable.mod.inspect_source("ll")


@pytest.fixture(scope="module", params=list(FUNCTIONS))
def kernel(request):
    expanded, reference = FUNCTIONS[request.param]
    return build(expanded, SIZE), reference


def test_error_is_within_four_units_in_the_last_place(kernel):
    (run, _), reference = kernel
    for low, high in RANGES:
        x = torch.linspace(low, high, SIZE)
        y = torch.empty_like(x)
        run(x, y)
        exact = reference(x.double())
        unit = torch.maximum(exact.abs() * 2.0**-23, torch.tensor(2.0**-149))
        finite = exact.abs() < torch.finfo(torch.float32).max
        # Below 2**-126 results are rounded to multiples of 2**-149, or flushed by the last multiplication.
        subnormal = exact.abs() < 2.0**-126
        assert ((y - exact).abs() / unit)[finite & ~subnormal].max() <= 4
        assert y[subnormal].abs().max() <= 2.0**-126 if subnormal.any() else True
        assert torch.isinf(y[~finite]).all()


def test_special_values_are_libm_s(kernel):
    (run, _), reference = kernel
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 88.7, -87.3, -103.0, -104.0, 1e-30]
    x = torch.tensor((special * (SIZE // len(special) + 1))[:SIZE])
    y = torch.empty_like(x)
    run(x, y)
    torch.testing.assert_close(y, reference(x), rtol=1e-6, atol=1e-38, equal_nan=True)


def test_stays_in_vectors(kernel):
    (_, text), _ = kernel
    assert "<16 x float>" in text
    assert not any(f"call <16 x float> @llvm.{name}." in text for name in ("exp", "tanh", "pow"))
    assert not any(f"@{name}f(" in text for name in ("exp", "tanh", "erf", "pow"))


# TVM has no pow in bf16.
HALF_CASES = [(name, "float16") for name in FUNCTIONS] + [(name, "bfloat16") for name in FUNCTIONS if name != "cube"]


@pytest.mark.parametrize("name, dtype", HALF_CASES)
def test_half_types_are_computed_in_fp32(name, dtype):
    expanded, reference = FUNCTIONS[name]
    run, _ = build(lambda x: x * expanded(x), 256, dtype)
    x = torch.linspace(-4, 4, 256).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    run(x, y)
    tolerance = {"float16": 2e-3, "bfloat16": 1e-2}[dtype]
    torch.testing.assert_close(y.float(), x.float() * reference(x.float()), rtol=tolerance, atol=tolerance)


def test_bf16_conversion_below_an_expanded_call_is_right():
    """TVM overlooks a conversion from bf16 below a bound variable and reads the bits as an integer."""
    run, _ = build(lambda x: tirx.exp(x.astype("float32") - 1.0), 256, "bfloat16")
    x = torch.linspace(-4, 4, 256).bfloat16()
    y = torch.empty(256)
    run(x, y)
    torch.testing.assert_close(y, torch.exp(x.float() - 1.0), rtol=1e-6, atol=0)


def test_function_without_such_calls_is_unchanged():
    x = te.placeholder((8,), name="x")
    func = te.create_prim_func([x, te.compute((8,), lambda i: tirx.sqrt(x[i]) + 1.0)])
    assert expand_math(widen_bf16(func)).same_as(func)


def test_double_keeps_libm():
    x = te.placeholder((8,), "float64", name="x")
    func = te.create_prim_func([x, te.compute((8,), lambda i: tirx.exp(x[i]))])
    assert expand_math(func).same_as(func)
