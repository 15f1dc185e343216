"""The vector building blocks of the CPU kernels, compiled alone."""

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.attention.cpu import vector as cpu_vector
from tir_kernels.target import parse_target


def compiled(function):
    return tvm.compile(function, target=parse_target("llvm"))["kernel"]


def kernel_of(function, n):
    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")):
        for i in T.serial(n // 8):
            with T.sblock("apply"):
                vi = T.axis.spatial(n // 8, i)
                y[T.ramp(vi * 8, 1, 8)] = function(x[T.ramp(vi * 8, 1, 8)], 8)

    return compiled(kernel)


def apply(function, x):
    """The results of a function of vectors of 8."""
    x = np.asarray(x, np.float32)
    padded = np.zeros(-(-len(x) // 8) * 8, np.float32)
    padded[: len(x)] = x
    y = tvm.runtime.tensor(np.empty_like(padded))
    kernel_of(function, len(padded))(tvm.runtime.tensor(padded), y)
    return y.numpy()[: len(x)]


def test_exp2_error():
    x = np.concatenate([np.linspace(-126, 0, 100_003), -np.logspace(-30, 0, 997)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(apply(cpu_vector.exp2, x) - exact) / exact).max() < 2e-7


def test_exp2_of_special_values():
    inf, nan, largest = float("inf"), float("nan"), float(np.finfo(np.float32).max)
    y = apply(cpu_vector.exp2, [0.0, -0.0, -1.0, -126.0, -126.5, -1e30, -largest, -inf, nan])
    np.testing.assert_array_equal(y, np.float32([1, 1, 0.5, 2.0**-126, 0, 0, 0, 0, nan]))


def test_tanh_error():
    x = np.concatenate([np.linspace(-12, 12, 100_003), np.logspace(-37, 38, 9997), -np.logspace(-37, 38, 9997)])
    x = x[x != 0].astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(apply(cpu_vector.tanh, x) - exact) / np.abs(exact)).max() < 2e-7


def test_tanh_of_special_values():
    inf, nan, largest = float("inf"), float("nan"), float(np.finfo(np.float32).max)
    y = apply(cpu_vector.tanh, [0.0, -0.0, 1e-45, -1e-40, largest, -largest, inf, -inf, nan])
    np.testing.assert_array_equal(y, np.float32([0, 0, 1e-45, -1e-40, 1, -1, 1, -1, nan]))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_transpose(width):
    @T.prim_func(s_tir=True)
    def kernel(a: T.Buffer((width, width), "float32"), b: T.Buffer((width, width), "float32")):
        with T.sblock("transpose"):
            T.reads(a[0:width, 0:width])
            T.writes(b[0:width, 0:width])
            x = T.sblock_alloc_buffer((width,), f"float32x{width}", scope="local")
            y = T.sblock_alloc_buffer((width,), f"float32x{width}", scope="local")
            for r in T.unroll(width):
                x[r] = a[r, T.ramp(0, 1, width)]
            cpu_vector.transpose(x, y, width)
            for r in T.unroll(width):
                b[r, T.ramp(0, 1, width)] = x[r]

    a = np.arange(width * width, dtype=np.float32).reshape(width, width)
    b = tvm.runtime.tensor(np.zeros_like(a))
    compiled(kernel)(tvm.runtime.tensor(a), b)
    np.testing.assert_array_equal(b.numpy(), a.T)


@pytest.mark.parametrize("width", [1, 2, 8, 16])
def test_horizontal_sum_and_max(width):
    @T.prim_func(s_tir=True)
    def kernel(a: T.Buffer((width,), "float32"), b: T.Buffer((2,), "float32")):
        with T.sblock("fold"):
            T.reads(a[0:width])
            T.writes(b[0:2])
            b[0] = cpu_vector.horizontal_sum(a[cpu_vector.span(0, width)], width)
            b[1] = cpu_vector.horizontal_max(a[cpu_vector.span(0, width)], width)

    a = np.random.default_rng(0).integers(-99, 99, width).astype(np.float32)
    b = tvm.runtime.tensor(np.zeros(2, np.float32))
    compiled(kernel)(tvm.runtime.tensor(a), b)
    np.testing.assert_array_equal(b.numpy(), [a.sum(), a.max()])


@pytest.mark.parametrize("length", [1, 8, 20, 80, 255, 256])
@pytest.mark.parametrize("width", [4, 16])
def test_pieces_cover_a_row_once_with_powers_of_two(length, width):
    covered = [i for start, size in cpu_vector.pieces(length, width) for i in range(start, start + size)]
    assert covered == list(range(length))
    assert all(size <= width and size & (size - 1) == 0 for _, size in cpu_vector.pieces(length, width))


@pytest.mark.parametrize(
    "cpu, triple, lanes, registers",
    [
        ("x86-64", "x86_64-linux-gnu", 4, 16),
        ("haswell", "x86_64-linux-gnu", 8, 16),
        ("znver4", "x86_64-linux-gnu", 16, 32),
        ("cortex-a72", "aarch64-linux-gnu", 4, 32),
    ],
)
def test_vector_sizes_of_targets(cpu, triple, lanes, registers):
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": triple})
    assert (cpu_vector.lanes(target), cpu_vector.registers(target)) == (lanes, registers)
