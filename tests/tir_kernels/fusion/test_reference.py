"""The NumPy definition of fused problems against PyTorch's operators."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tir_kernels.errors import InputError
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.reference import fusion_reference

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def assert_equal(actual, *expected):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(x), y, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind):
    x = normal(5, 16) * 3
    assert_equal(fusion_reference(RowProblem(5, 16, "float32", (Step(kind),)), x), ACTIVATIONS[kind](x))


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_product_steps_and_layer_norm(w_layout):
    a, w, bias, residual, weight, shift = (
        normal(5, 8),
        normal(16, 8),
        *normal(1, 1, 16)[0],
        *[normal(5, 16)],
        *normal(2, 16),
    )
    steps = (Step("add", "row"), Step("scale", value=0.5), Step("multiply", "matrix"))
    problem = GemmProblem(5, 16, "float32", steps, Norm("layer_norm", 1e-5), True, k=8, w_layout=w_layout)
    x = (a @ w.T + bias) * 0.5 * residual
    given = w if w_layout == "nk" else w.T
    expected = F.layer_norm(x, (16,), weight, shift, 1e-5)
    assert_equal(fusion_reference(problem, a, given, bias, residual, weight, shift), expected, x)


def test_clip():
    x = normal(5, 8)
    assert_equal(fusion_reference(RowProblem(5, 8, "float32", (Step("clip", value=0.5),)), x), x.clamp(-0.5, 0.5))


def test_two_products():
    a, w, bias, w2, residual = normal(5, 8), normal(16, 8), normal(1, 1, 16)[0, 0], normal(24, 16), normal(5, 24)
    first = GemmProblem(5, 16, "float32", (Step("add", "row"), Step("relu")), k=8)
    problem = MlpProblem(first, GemmProblem(5, 24, "float32", (Step("add", "matrix"),), k=16))
    expected = F.relu(a @ w.T + bias) @ w2.T + residual
    assert [x.shape for x in (a, w, bias, w2, residual)] == [shape for shape, _ in problem.inputs]
    assert_equal(fusion_reference(problem, a, w, bias, w2, residual), expected)


def test_rms_norm_without_vectors():
    x = normal(5, 16)
    norm = Norm("rms_norm", 1e-6, weight=False, bias=False)
    assert_equal(fusion_reference(RowProblem(5, 16, "float32", norm=norm), x), F.rms_norm(x, (16,), None, 1e-6))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_deferred_norm_is_the_norm(kind):
    """A product, a norm with weights, a product that adds the norm's result: deferred and as they are."""
    rng = np.random.default_rng(0)
    m, n, k = 5, 128, 24
    norm, bare = Norm(kind, 1e-5, bias=kind == "layer_norm"), Norm(kind, 1e-5, False, False)
    a, w, w2, a3, w3 = (rng.standard_normal(s) for s in ((m, k), (n, k), (8, n), (m, k), (n, k)))
    vectors = [rng.standard_normal(n) for _ in range(1 + norm.bias)]
    (y,) = fusion_reference(GemmProblem(m, n, "float32", norm=norm, k=k), a, w, *vectors)

    x, statistics = fusion_reference(GemmProblem(m, n, "float32", k=k, statistics=True), a, w)
    folded = w2 * vectors[0]
    columns = [np.stack([folded.sum(1), w2 @ vectors[1]])] if norm.bias else []
    (out,) = fusion_reference(GemmProblem(m, 8, "float32", k=n, a_norm=bare), x, folded, statistics, *columns)
    np.testing.assert_allclose(out, y @ w2.T, rtol=1e-9)
    add, columns = Step("add", "normed", norm=bare), np.stack([vectors[0], vectors[1] if norm.bias else 0 * vectors[0]])
    (out,) = fusion_reference(GemmProblem(m, n, "float32", (add,), k=k), a3, w3, x, statistics, columns)
    np.testing.assert_allclose(out, a3 @ w3.T + y, rtol=1e-9)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ({"kind": "clip"}, "'clip' takes a float value, got None"),
        ({"kind": "clip", "value": 0.0}, "'clip' takes a positive value, got 0.0"),
        ({"kind": "clip", "value": math.nan}, "'clip' takes a positive value, got nan"),
        ({"kind": "scale", "value": 2}, "'scale' takes a float value, got 2"),
        ({"kind": "clip", "value": 1.0, "operand": "row"}, "'clip' takes a float value"),
        ({"kind": "gelu", "value": 1.0}, "'gelu' is not one of"),
        ({"kind": "add"}, "'add' takes an operand"),
    ],
)
def test_steps_that_are_none(arguments, why):
    with pytest.raises(InputError, match=why):
        Step(**arguments)
