"""Products of float32 fragments on tensor cores: one product of generated CUDA, run on the CPU, number by number."""

import math
import shutil

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.attention.float32 import tf32
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.float32 import functions
from tir_kernels.cuda.float32.fragments import fragment_products
from tir_kernels.cuda.float32.modes import MODES, check_mode, mma_time
from tir_kernels.errors import InputError
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
INF, NAN = math.inf, math.nan
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def emulated(kernel, folder) -> EmulatedKernel:
    function = finished(kernel, "main", [])
    with SM_80:
        built = tvm.compile(tvm.IRModule({"main": function}), target=SM_80, tir_pipeline="tirx")
    return EmulatedKernel(cuda_source(built), folder)


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """products[mode](a, b): a (16, 8) times b (8, 8), float32, as one warp multiplies them."""

    def product(mode):
        parts = fragment_products(mode)

        @T.jit(private=True)
        def kernel(a_handle: T.handle, b_handle: T.handle, c_handle: T.handle):
            a = T.match_buffer(a_handle, (16, 8), "float32", align=16)
            b = T.match_buffer(b_handle, (8, 8), "float32", align=16)
            c = T.match_buffer(c_handle, (16, 8), "float32", align=16)
            T.device_entry()
            T.cta_id([1])
            lane = T.thread_id([32])
            a_parts = T.alloc_local([parts.a_size], "uint32")
            b_parts = T.alloc_local([parts.b_size], "uint32")
            acc = T.alloc_local([4], "float32")
            for i in T.unroll(4):
                acc[i] = T.float32(0)
            parts.prepare_a(a_parts, 0, lambda i: a[i % 2 * 8 + lane // 4, i // 2 * 4 + lane % 4])
            parts.prepare_b(b_parts, 0, lambda i: b[i * 4 + lane % 4, lane // 4])
            parts.multiply(acc, 0, a_parts, 0, b_parts, 0)
            for i in T.unroll(4):
                c[i // 2 * 8 + lane // 4, lane % 4 * 2 + i % 2] = acc[i]

        run = emulated(kernel, tmp_path_factory.mktemp(mode))

        def of(a, b) -> torch.Tensor:
            c = aligned(np.zeros((16, 8), np.float32))
            run({"a": aligned(a), "b": aligned(b), "c": c}, {}, [0], 32, 16)
            return torch.from_numpy(c.copy())

        return of

    return {mode: product(mode) for mode in MODES}


def normal(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@needs_gxx
def test_ieee_is_as_exact_as_float32(products):
    a, b = normal(16, 8), normal(8, 8, seed=1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    assert (np.abs(products["ieee"](a, b).numpy() - exact) <= bound * 2.0**-21).all()


@needs_gxx
def test_tf32_is_the_product_of_rounded_numbers(products):
    a, b = (torch.from_numpy(x) for x in (normal(16, 8), normal(8, 8, seed=1)))
    torch.testing.assert_close(products["tf32"](a.numpy(), b.numpy()), tf32(a) @ tf32(b), rtol=1e-6, atol=1e-6)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 1.0 + 2**-11, 3e-3, 1.7e19, 2.0**127, 3.4e38, -3.4e38, 1e-30, INF, -INF, NAN)


@needs_gxx
@pytest.mark.parametrize("x", [*SPECIAL, -1 - 2**-12, 1 - 2**-24, float.fromhex("0x1.fffff8p127"), 2.0**-126])
def test_infinite_and_large_numbers_give_what_ieee_gives(x, products):
    """One product, of factors whose parts have either sign: never NaN where IEEE has a number or infinity."""
    others = np.float32([*SPECIAL, 0.75, 1 + 2**-12, -1 - 2**-12 - 2**-23, 5e10, -2e20, 1.5 * 2**40])
    one = np.zeros((16, 8), np.float32)
    one[:, 3] = x
    for first in range(0, len(others), 8):
        column = others[first : first + 8]
        b = np.zeros((8, 8), np.float32)
        b[3, : len(column)] = column
        with np.errstate(all="ignore"):
            expected = np.float32(x) * column
        actual = products["ieee"](one, b).numpy()[0, : len(column)]
        np.testing.assert_allclose(actual, expected, rtol=2.0**-21, atol=2.0**-136, err_msg=f"{x} * {column}")
        # The same with the operands exchanged.
        a = np.zeros((16, 8), np.float32)
        a[: len(column), 3] = column
        b = np.zeros((8, 8), np.float32)
        b[3] = x
        actual = products["ieee"](a, b).numpy()[: len(column), 0]
        np.testing.assert_allclose(actual, expected, rtol=2.0**-21, atol=2.0**-136, err_msg=f"{column} * {x}")


@needs_gxx
def test_the_two_largest_numbers_round_to_infinity_and_subnormal_ones_take_part(products):
    below = np.nextafter(np.nextafter(np.float32(LARGEST), np.float32(0)), np.float32(0))
    tiny = 2.0**-130
    a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    a[:5, 0] = LARGEST, below, tiny, SMALLEST, LARGEST
    b[0, :3] = 1.0, 0.5, 2.0**100
    actual = products["ieee"](a, b).numpy()
    assert actual[0, 0] == INF and actual[0, 1] == np.float32(LARGEST) / 2 + np.float32(2.0**103)
    np.testing.assert_allclose(actual[1, 0], below, rtol=2.0**-21)
    assert actual[2, 0] == np.float32(tiny) and actual[2, 2] == np.float32(2.0**-30)
    assert actual[3, 2] == 0  # below the steps of 2^-136


@needs_gxx
def test_sums_with_infinities_are_those_of_ieee(products):
    a, b = normal(16, 8), normal(8, 8, seed=1)
    a[2, 1], a[3, 2], a[4, 3:5] = INF, -INF, (INF, -INF)
    a[5, 0], b[6, 7] = NAN, INF
    with np.errstate(invalid="ignore"):
        expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(products["ieee"](a, b).numpy(), expected, rtol=1e-4, atol=1e-5)
    assert np.isinf(expected).sum() > 8 and np.isnan(expected).sum() > 8


@needs_gxx
@pytest.mark.parametrize("name, exact", [("tanh", torch.tanh), ("gelu", torch.nn.functional.gelu)])
def test_functions_are_right_to_float32(name, exact, tmp_path):
    function = getattr(functions, name)

    @T.jit(private=True)
    def kernel(x_handle: T.handle):
        x = T.match_buffer(x_handle, (4096,), "float32", align=16)
        T.device_entry()
        cta = T.cta_id([128])
        lane = T.thread_id([32])
        x[cta * 32 + lane] = function(x[cta * 32 + lane])

    x = np.sinh(np.linspace(-4, 4, 4096)).astype(np.float32)
    x[:3] = -INF, INF, NAN
    array = aligned(x)
    emulated(kernel, tmp_path)({"x": array}, {}, range(128), 32, 16)
    expected = exact(torch.from_numpy(x).double()).numpy()
    if name == "gelu":  # PyTorch's, too, is NaN at -inf in float32
        array[0] = expected[0]
    # gelu adds 1 and erf, as PyTorch does: near -1 that leaves an absolute error.
    np.testing.assert_allclose(array, expected, rtol=4e-7, atol=0 if name == "tanh" else 3e-7)


@pytest.mark.parametrize("mode", ["", "TF32", "highest", None, True, ["ieee"]])
def test_an_unknown_mode_is_named(mode):
    with pytest.raises(InputError, match=r"float32=.* is not one of 'ieee', 'tf32'"):
        check_mode(mode)


def test_modes_are_of_float32():
    check_mode("tf32", "float32")
    check_mode("ieee", "float16")
    with pytest.raises(InputError, match="float32='tf32' for operands of float16"):
        check_mode("tf32", "float16")


def test_products_take_as_long_as_tensor_cores_need():
    assert [mma_time("float16", "ieee"), mma_time("float32", "tf32"), mma_time("float32", "ieee")] == [1, 2, 6]
