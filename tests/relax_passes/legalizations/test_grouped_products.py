"""Grouped products without a template: weights of either layout, constants or inputs, on LLVM and for CUDA."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.fusion.fold_closed_expressions import FoldClosedExpressions
from relax_passes.ir.operators.grouped_products import grouped_product
from relax_passes.legalizations.grouped_products import problem_of_function
from relax_passes.schedule.cpu import cpu_passes
from relax_passes.schedule.cuda import cuda_passes
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import module_of, run
from tir_kernels.target import parse_target

RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((9, 12)).astype("float32")
OFFSETS = np.array([4, 4, 8], "int32")


def module(layout, w, is_constant):
    a, offsets = relax.Var("a", relax.TensorType(A.shape, "float32")), relax.Var("o", relax.TensorType((3,), "int32"))
    given = relax.const(w) if is_constant else relax.Var("w", relax.TensorType(w.shape, "float32"))
    params = [a, offsets] if is_constant else [a, offsets, given]
    return module_of(params, lambda builder: builder.emit(grouped_product(a, given, offsets, layout)))


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_weights_of_either_layout(layout, is_constant):
    w = RANDOM.standard_normal((3, 12, 20)).astype("float32")
    given = w.swapaxes(1, 2).copy() if layout == "nk" else w
    values = [A, OFFSETS] if is_constant else [A, OFFSETS, given]
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(module(layout, given, is_constant))
    (out,) = run(mod, *values)
    expected = np.concatenate([A[:4] @ w[0], A[4:8] @ w[2], np.zeros((1, 20))])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_constants_are_multiplied_at_compile_time():
    offsets = relax.const(OFFSETS)
    w = RANDOM.standard_normal((3, 20, 12)).astype("float32")
    mod = module_of([], lambda builder: builder.emit(grouped_product(relax.const(A), relax.const(w), offsets, "nk")))
    (constant,) = run(FoldClosedExpressions()(mod))
    np.testing.assert_allclose(constant[:4], A[:4] @ w[0].T, atol=1e-5)


def test_on_a_gpu_every_element_has_a_thread():
    target = parse_target("cuda -arch=sm_80")
    with target:
        mod = tvm.transform.Sequential(cuda_passes(target))(module("nk", np.zeros((3, 20, 12), "float32"), False))
    (function,) = (f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    assert problem_of_function(function) is not None and bool(function.attrs["tirx.is_scheduled"])
    assert function.script().count('thread="threadIdx.x"') == 2  # groups of rows, then elements
