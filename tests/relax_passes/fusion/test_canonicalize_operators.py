"""Spelled-out norms and activations become one operator; near misses stay."""

import math

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from relax_passes.fusion.canonicalize_operators import CanonicalizeOperators
from tests.relax_passes.fusion.modules import inputs_of, module_of, run, weight

op = relax.op


def spelled(body, dtype="float32"):
    """main(x) that returns what `body(emit, x)` does; numbers are constants of x's dtype."""
    x = relax.Var("x", relax.TensorType((4, 8), dtype))
    return module_of([x], lambda builder: body(builder.emit, x))


def number(value, dtype="float32"):
    return relax.const(value, dtype)


def calls(mod) -> list[str]:
    values = [b.value for b in mod["main"].body.blocks[0].bindings]
    return [v.op.name.removeprefix("relax.") for v in values if isinstance(v, relax.Call)]


def gelu_tanh(emit, x, factor=0.044715, dtype="float32"):
    cube = emit(op.multiply(emit(op.multiply(x, x)), x))
    inner = emit(op.add(x, emit(op.multiply(cube, number(factor, dtype)))))
    curve = emit(op.tanh(emit(op.multiply(inner, number(math.sqrt(2 / math.pi), dtype)))))
    half = emit(op.multiply(x, number(0.5, dtype)))
    return emit(op.multiply(half, emit(op.add(curve, number(1.0, dtype)))))


def gelu_erf(emit, x):
    curve = emit(op.erf(emit(op.divide(x, number(math.sqrt(2))))))
    total = emit(op.add(number(1.0), curve))
    return emit(op.multiply(emit(op.multiply(x, total)), number(0.5)))


def silu(emit, x):
    return emit(op.multiply(emit(op.sigmoid(x)), x))


def rms_norm(emit, x, eps=1e-6, axis=-1, weight_first=True, narrow=None):
    variance = emit(op.mean(emit(op.multiply(x, x)), [axis], keepdims=True))
    scale = emit(op.rsqrt(emit(op.add(variance, number(eps)))))
    normed = emit(op.multiply(x, scale))
    w = weight(8)
    if narrow:
        normed = emit(op.astype(normed, narrow))
        w = relax.const(w.value.numpy().astype(narrow))
    return emit(op.multiply(w, normed) if weight_first else op.multiply(normed, w))


@pytest.mark.parametrize(
    "body, name",
    [
        (gelu_tanh, "nn.gelu_tanh"),
        (gelu_erf, "nn.gelu"),
        (silu, "nn.silu"),
        (rms_norm, "nn.rms_norm"),
        (lambda emit, x: rms_norm(emit, x, weight_first=False), "nn.rms_norm"),
    ],
    ids=["gelu_tanh", "gelu", "silu", "rms_norm", "rms_norm weight last"],
)
def test_becomes_one_operator_of_the_same_value(body, name):
    mod = spelled(body)
    canonical = CanonicalizeOperators()(mod)
    assert calls(canonical) == [name]
    values = inputs_of(mod)
    np.testing.assert_allclose(run(canonical, *values)[0], run(mod, *values)[0], atol=2e-6)


def test_constants_rounded_to_half_precision_are_recognised():
    assert calls(CanonicalizeOperators()(spelled(lambda e, x: gelu_tanh(e, x, dtype="float16"), "float16"))) == [
        "nn.gelu_tanh"
    ]


def test_a_norm_in_float32_of_a_half_precision_stream():
    """As LLaMA has it: cast up, normalise, cast down, weight.  The epsilon and the sum are those of the model."""

    def body(emit, x):
        return rms_norm(emit, emit(op.astype(x, "float32")), 1e-5, narrow="float16")

    mod = spelled(body, "float16")
    canonical = CanonicalizeOperators()(mod)
    assert calls(canonical) == ["astype", "astype", "nn.rms_norm", "astype"]
    x = inputs_of(mod)[0].astype("float16")
    w = torch.from_numpy(weight(8).value.numpy().astype("float16"))
    wide = torch.from_numpy(x).double()
    expected = torch.nn.functional.rms_norm(wide, (8,), w.double(), 1e-5)
    np.testing.assert_allclose(run(canonical, x)[0], expected.numpy(), atol=2e-3)


def overflow_clamp(emit, x, less=64504.0, most=65504.0, asked=None, dtype="float16"):
    """As the T5 family has it, with the casts of PyTorch's export."""
    infinite = emit(op.astype(emit(op.isinf(x if asked is None else asked(emit, x))), "int32"))
    is_any = emit(op.astype(emit(op.max(infinite)), "bool"))
    bound = emit(op.where(is_any, number(less), number(most)))
    lower = emit(op.astype(emit(op.negative(bound)), dtype))
    return emit(op.minimum(emit(op.maximum(x, lower)), emit(op.astype(bound, dtype))))


def test_a_clamp_against_overflow_asks_nothing_of_the_whole_tensor():
    mod = spelled(overflow_clamp, "float16")
    canonical = CanonicalizeOperators()(mod)
    assert calls(canonical) == ["clip"]
    x = np.linspace(-65504, 65504, 32, dtype="float16").reshape(4, 8)
    np.testing.assert_array_equal(run(canonical, x)[0], run(mod, x)[0])
    x[1, 2], x[3, 4] = np.inf, -np.inf
    np.testing.assert_allclose(run(canonical, x)[0], run(mod, x)[0], rtol=1000 / 64504)
    assert np.isfinite(run(canonical, x)[0]).all()


def leaky(emit, x):
    """A sigmoid of something else."""
    return emit(op.multiply(emit(op.sigmoid(emit(op.add(x, x)))), x))


def unscaled(emit, x):
    """No half."""
    return emit(op.multiply(x, emit(op.add(emit(op.erf(emit(op.multiply(x, number(math.sqrt(0.5)))))), number(1.0)))))


@pytest.mark.parametrize(
    "body",
    [
        leaky,
        unscaled,
        lambda emit, x: gelu_tanh(emit, x, factor=0.05),
        lambda emit, x: rms_norm(emit, x, axis=0),
        lambda emit, x: overflow_clamp(emit, x, dtype="float32"),
        lambda emit, x: overflow_clamp(emit, x, [*range(8)], [*range(1, 9)], dtype="float32"),
    ],
    ids=["sigmoid of 2x", "no half", "another cubic", "along rows", "no half precision", "no number, either"],
)
def test_near_misses_stay(body):
    mod = spelled(body)
    tvm.ir.assert_structural_equal(CanonicalizeOperators()(mod), mod)


@pytest.mark.parametrize(
    "change",
    [
        {"less": 65504.0},
        {"less": 1.0},
        {"most": 65000.0},
        {"less": [*range(8)], "most": [*range(1, 9)]},
        {"asked": lambda emit, x: emit(op.add(x, x))},
    ],
    ids=["no less", "far less", "not the largest", "several bounds", "infinities of something else"],
)
def test_other_clamps_stay(change):
    mod = spelled(lambda emit, x: overflow_clamp(emit, x, **change), "float16")
    tvm.ir.assert_structural_equal(CanonicalizeOperators()(mod), mod)
