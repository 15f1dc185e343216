"""Kernels that store their result twice: both copies are the result, and what does more than store is refused."""

import shutil

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.kernels import make_inputs
from tir_kernels.fusion.gemm import gemm, gemv
from tir_kernels.fusion.gemm.gemv import GemvConfig
from tir_kernels.fusion.problem import GemmProblem, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.second_output import with_second_output
from tir_kernels.target import parse_target

SM_90A = parse_target("cuda -arch=sm_90a")


def names(kernel) -> list[str]:
    return [str(x) for x in kernel.params]


class Twice:
    """A template of kernels that store twice."""

    operands = gemv.operands

    @staticmethod
    def instantiate(*given):
        return with_second_output(gemv.instantiate(*given), 3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
def test_a_product_is_stored_in_both_buffers(tmp_path):
    problem, config = GemmProblem(3, 64, "float16", (Step("add", "row"),), k=264), GemvConfig(16, 4, 2)
    inputs = make_inputs(problem)
    arrays = {name: aligned(x.numpy()) for name, x in zip(("a", "w", "operand0"), inputs)}
    arrays |= {name: aligned(np.full((3, 64), np.nan, np.float16)) for name in ("out", "out_again")}
    kernel = EmulatedKernel(source(Twice, problem, config, "sm_80"), tmp_path)
    kernel(arrays, {}, range(gemv.n_ctas(problem, config)), 32 * config.warps, gemv.shared_bytes(config))
    (expected,) = fusion_reference(problem, *(x.double() for x in inputs))
    np.testing.assert_allclose(arrays["out"].astype(float), expected, atol=2e-3)
    np.testing.assert_array_equal(arrays["out_again"], arrays["out"])


@pytest.mark.parametrize("m, k", [(16384, 2048), (300, 512), (64, 4096)])
def test_every_tile_of_a_product_can(m, k):
    problem = GemmProblem(m, 1024, "float16", k=k)
    for config in gemm.configs(problem, SM_90A)[::40]:
        kernel = gemm.instantiate(problem, config, SM_90A)
        changed = with_second_output(kernel, names(kernel).index("out"))
        assert names(changed) == [*names(kernel), "out_again"]
        assert changed.script().count("out_again[") == kernel.script().count("out[") > 0


@T.prim_func
def plain(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    for i in range(8):
        out[i] = x[i] * T.float32(2)


@T.prim_func
def running(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    for i in range(8):
        out[i] = out[i] + x[i]


@T.prim_func
def read(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    for i in range(8):
        out[i] = x[i]
    for i in range(8):
        x[i] = out[7 - i]


@T.prim_func
def passed_on(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    for i in range(8):
        out[i] = x[i]
    T.evaluate(T.call_extern("int32", "more", out.data))


@T.prim_func
def unwritten(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    for i in range(8):
        x[i] = T.float32(0)


def test_a_function_of_loops_stores_twice():
    function = with_second_output(plain, 1)
    library = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm")
    x, out, again = (torch.full((8,), value) for value in (3.0, -1.0, -1.0))
    library["main"](*map(tvm.runtime.from_dlpack, (x, out, again)))
    assert (out == 6).all() and (again == 6).all()


@pytest.mark.parametrize("function", [running, read, passed_on, unwritten], ids=lambda f: f.attrs["global_symbol"])
def test_what_does_more_than_store_is_refused(function):
    assert with_second_output(function, 1) is None
