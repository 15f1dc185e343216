"""The tensor expressions of the fusion problems against their definitions in NumPy."""

import numpy as np
import pytest
import torch
import tvm

from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.problems.grouped import reference
from tir_kernels.target import parse_target
from tir_kernels.tuning.workload import fusion_workload

ACTIVATIONS = tuple(Step(kind) for kind in ("gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid"))
OPERANDS = (
    Step("add", "row"),
    Step("multiply", "matrix"),
    Step("scale", value=0.5),
    Step("clip", value=0.6),
    Step("add", "matrix"),
)


def run(problem, inputs, out_shapes):
    """The outputs of a workload on LLVM."""
    target = parse_target("llvm")
    with target:
        function = tvm.compile(fusion_workload(problem), target=target)["main"]
    arguments = [tvm.runtime.tensor(x) for x in inputs]
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, problem.dtype)) for shape in out_shapes]
    function(*arguments, *outputs)
    return [x.numpy() for x in outputs]


def random(*shapes, dtype="float32"):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    "problem",
    [
        RowProblem(3, 8, "float32", ACTIVATIONS),
        RowProblem(3, 8, "float32", OPERANDS, Norm("layer_norm", 1e-5), keeps_sum=True),
        RowProblem(3, 8, "float32", (Step("add", "matrix"),), Norm("rms_norm", 1e-6, bias=False)),
        GemmProblem(3, 8, "float32", OPERANDS, k=5),
        GemmProblem(3, 8, "float32", (), Norm("layer_norm", 1e-5, weight=False), k=5, w_layout="kn"),
        MlpProblem(
            GemmProblem(3, 7, "float32", OPERANDS, k=5),
            GemmProblem(3, 8, "float32", OPERANDS, Norm("layer_norm", 1e-5), keeps_sum=True, k=7, w_layout="kn"),
        ),
    ],
    ids=str,
)
def test_rows_and_products(problem):
    inputs = random(*(shape for shape, _ in problem.inputs))
    expected = fusion_reference(problem, *inputs)
    actual = run(problem, inputs, [(problem.m, problem.n)] * len(expected))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5, False, False), Norm("rms_norm", 1e-6, False, False)


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(3, 128, "float32", (Step("add", "row"),), k=5, statistics=True),
        GemmProblem(3, 8, "float32", (Step("gelu"),), k=128, a_norm=LAYER_NORM),
        GemmProblem(3, 8, "float32", (), k=128, a_norm=RMS_NORM, w_layout="kn"),
        GemmProblem(3, 64, "float32", (Step("add", "normed", norm=LAYER_NORM),), k=5, statistics=True),
        GemmProblem(3, 64, "float32", (Step("add", "normed", norm=RMS_NORM),), k=5),
    ],
    ids=str,
)
def test_deferred_norms(problem):
    inputs = random(*(shape for shape, _ in problem.inputs))
    inputs = [np.stack([x[..., 0], 64 * x[..., 1] ** 2], -1) if x.ndim == 3 else x for x in inputs]
    expected = fusion_reference(problem, *inputs)
    actual = run(problem, inputs, [shape for shape, _ in problem.outputs])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-5)


def test_half_precision_is_computed_in_float32():
    problem = RowProblem(2, 8, "float16", (Step("scale", value=1000.0), Step("scale", value=0.001)))
    (x,) = random((2, 8), dtype="float16")
    (out,) = run(problem, [x * 100], [(2, 8)])
    np.testing.assert_allclose(out, x * 100, rtol=1e-3)


def test_embedding():
    problem = EmbeddingProblem(
        6, 8, "float32", (Table(10), Table(3, period=3)), norm=Norm("rms_norm", 1e-6, bias=False)
    )
    words, positions, weight = random((10, 8), (3, 8), (8,))
    index = np.array([3, 1, 9, 0, 3, 3])
    periodic = np.array([2, 0, 1])
    (out,) = run(problem, [index, words, periodic, positions, weight], [(6, 8)])
    total = words[index] + positions[np.tile(periodic, 2)]
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for outside in (-1, 10):
        index[2] = outside
        (out,) = run(problem, [index, words, periodic, positions, weight], [(6, 8)])
        assert np.isnan(out).all(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_grouped_products(layout):
    problem = GroupedProblem(7, 8, 5, 3, "float32", layout)
    a, w = random((7, 5), problem.w_shape)
    (actual,) = run(problem, [a, w, np.array([2, 2, 6], "int32")], [(7, 8)])
    matrices = w.swapaxes(1, 2) if layout == "nk" else w
    expected = np.concatenate([a[:2] @ matrices[0], a[2:6] @ matrices[2], np.zeros((1, 8))])
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_grouped_products_have_gates_and_steps_and_choose_rows(dtype):
    steps = (Step("scale", value=2.0), Step("sigmoid"))
    problem = GroupedProblem(5, 8, 3, 2, dtype, "kn", gate="silu", steps=steps, gathered_from=4, rows_dtype="int64")
    inputs = [*random((4, 3), problem.w_shape, dtype=dtype), np.array([1, 4], "int32"), np.array([3, 0, 4, -1, 2])]
    (actual,) = run(problem, inputs, [(5, 8)])
    tensors = [torch.tensor(x if x.dtype.kind == "i" else x.astype("float64")) for x in inputs]
    (expected,) = reference(problem, tensors, torch)
    np.testing.assert_allclose(actual, expected, atol=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize("packed_heads", [None, 5])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rotary(packed_heads, layout):
    problem = RotaryProblem(2, 3, 2, 1, 4, "float32", packed_heads, 1, "float32", layout)
    sources = random(*problem.source_shapes)
    cos, sin = random(problem.table_shape, problem.table_shape)
    outputs = run(problem, [*sources, cos, sin], problem.out_shapes)
    q, k = sources if packed_heads is None else (sources[0][:, :, :2], sources[0][:, :, 2:3])
    for x, out in zip((q, k), outputs):
        turned = np.concatenate([-x[..., 2:], x[..., :2]], -1)
        expected = x * cos[:, :, None] + turned * sin[:, :, None]
        np.testing.assert_allclose(out, expected if layout == "bshd" else expected.swapaxes(1, 2), atol=1e-6)
