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
ROOT_OF_HALF, ROOT_OF_2_BY_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


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


def plain_norm(emit, x):
    mean = emit(op.mean(emit(op.multiply(x, x)), [-1], keepdims=True))
    return emit(op.multiply(x, emit(op.rsqrt(emit(op.add(mean, number(1e-6)))))))


def clamp(emit, x, order=(op.maximum, op.minimum), bounds=(-0.5, 0.5)):
    for operator, bound in zip(order, bounds):
        x = emit(operator(x, number(bound)))
    return x


@pytest.mark.parametrize(
    "body, name",
    [
        (gelu_tanh, "nn.gelu_tanh"),
        (gelu_erf, "nn.gelu"),
        (silu, "nn.silu"),
        (rms_norm, "nn.rms_norm"),
        (lambda emit, x: rms_norm(emit, x, weight_first=False), "nn.rms_norm"),
        (lambda emit, x: plain_norm(emit, x), "nn.rms_norm"),
        (lambda emit, x: clamp(emit, x), "clip"),
        (lambda emit, x: clamp(emit, x, (op.minimum, op.maximum), (0.5, -0.5)), "clip"),
    ],
    ids=[
        "gelu_tanh",
        "gelu",
        "silu",
        "rms_norm",
        "rms_norm weight last",
        "rms_norm no weight",
        "clip",
        "clip from above",
    ],
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


def near_gelu(half=0.5, one=1.0, root=ROOT_OF_HALF, dtype="float32", shape=()):
    """x * half * (one + erf(x * root))."""

    def body(emit, x):
        curve = emit(op.erf(emit(op.multiply(x, number(root, dtype)))))
        factor = relax.const(np.full(shape, half, dtype))
        return emit(op.multiply(emit(op.multiply(x, factor)), emit(op.add(curve, number(one, dtype)))))

    return body


def near_gelu_tanh(cubic=0.044715, root=ROOT_OF_2_BY_PI, dtype="float32"):
    def body(emit, x):
        cube = emit(op.multiply(emit(op.multiply(x, x)), x))
        inner = emit(op.add(x, emit(op.multiply(cube, number(cubic, dtype)))))
        curve = emit(op.tanh(emit(op.multiply(inner, number(root, dtype)))))
        return emit(op.multiply(emit(op.multiply(x, number(0.5, dtype))), emit(op.add(curve, number(1.0, dtype)))))

    return body


def near_rms_norm(
    mean_of=op.multiply,
    power=None,
    axes=(-1,),
    eps=1e-6,
    width=8,
    spread=None,
    root=op.rsqrt,
    late_eps=False,
    cast=None,
):
    """weight * (x * root(mean(x * x) + eps)), all but one of it as it should be."""

    def body(emit, x):
        square = emit(op.abs(x)) if power == 1 else emit(mean_of(x, emit(op.add(x, x)) if power == "other" else x))
        mean = emit(op.mean(square, list(axes), keepdims=True))
        added = mean if late_eps else emit(op.add(mean, number(eps)))
        scale = emit(root(added))
        scale = emit(op.add(scale, number(eps))) if late_eps else scale
        normed = emit(op.multiply(x, scale))
        normed = emit(op.astype(normed, cast)) if cast else normed
        w = weight(*(width if isinstance(width, tuple) else (width,)))
        return emit(op.multiply(normed, relax.const(w.value.numpy().astype(cast or "float32"))))

    return body


def gate_of_a_column(emit, x):
    """The sigmoid of one column gates them all."""
    return emit(op.multiply(x, emit(op.sigmoid(emit(op.strided_slice(x, [1], [0], [1]))))))


def spread_silu(emit, x):
    """One row's silu for every row of a matrix of ones."""
    ones = relax.const(np.ones((3, 4, 8), "float32"))
    return emit(op.multiply(emit(op.multiply(x, ones)), emit(op.sigmoid(x))))


NEAR_MISSES = {
    "0.501 for a half": near_gelu(half=0.501),
    "a half, an ulp off": near_gelu(half=float(np.nextafter(np.float32(0.5), 1, dtype="float32"))),
    "1.001 for one": near_gelu(one=1.001),
    "0.7072 for the root": near_gelu(root=0.7072),
    "the half is a larger tensor": near_gelu(shape=(3, 4, 8)),
    "0.04472 for the cubic": near_gelu_tanh(cubic=0.04472),
    "0.7979 for the root of 2 / pi": near_gelu_tanh(root=0.7979),
    "mean of |x|": near_rms_norm(power=1),
    "mean of 2 x²": near_rms_norm(power="other"),
    "mean over two dimensions": near_rms_norm(axes=(0, 1)),
    "mean over another dimension": near_rms_norm(axes=(0,)),
    "a negative epsilon": near_rms_norm(eps=-1e-6),
    "epsilon outside of the root": near_rms_norm(late_eps=True),
    "a root for its inverse": near_rms_norm(root=op.sqrt),
    "bounds that are not as far from 0": lambda emit, x: clamp(emit, x, bounds=(-0.5, 0.25)),
    "a lower bound above 0": lambda emit, x: clamp(emit, x, bounds=(0.5, -0.5)),
    "bounds at infinity": lambda emit, x: clamp(emit, x, bounds=(-math.inf, math.inf)),
    "an upper bound only": lambda emit, x: clamp(emit, x, (op.minimum,), (0.5,)),
    "a gate of one column": gate_of_a_column,
    "a silu that is broadcast": spread_silu,
}


@pytest.mark.parametrize("width", [1, (4, 1), (4, 8)], ids=["one number", "each row", "each element"])
def test_a_factor_that_is_no_weight_stays_behind_the_norm(width):
    mod = spelled(near_rms_norm(width=width))
    canonical = CanonicalizeOperators()(mod)
    assert calls(canonical) == ["nn.rms_norm", "multiply"]
    values = inputs_of(mod)
    np.testing.assert_allclose(run(canonical, *values)[0], run(mod, *values)[0], atol=2e-6)


def test_a_norm_in_float32_without_weight_is_cast_back():
    """As diffusion models have it: the sum of wide squares, the product of the narrow values."""

    def body(emit, x):
        square = emit(op.astype(x, "float32"))
        mean = emit(op.mean(emit(op.multiply(square, square)), [-1], keepdims=True))
        scale = emit(op.rsqrt(emit(op.add(mean, number(1e-6)))))
        return emit(op.astype(emit(op.multiply(emit(op.astype(x, "float32")), scale)), "float16"))

    mod = spelled(body, "float16")
    canonical = CanonicalizeOperators()(mod)
    assert calls(canonical)[-2:] == ["nn.rms_norm", "astype"] and "mean" not in calls(canonical)
    x = inputs_of(mod)[0].astype("float16")
    np.testing.assert_allclose(run(canonical, x)[0], run(mod, x)[0], atol=2e-3)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_almost_an_operator_stays(name):
    mod = spelled(NEAR_MISSES[name])
    tvm.ir.assert_structural_equal(CanonicalizeOperators()(mod), mod)


@pytest.mark.parametrize(
    "body",
    [
        near_gelu(half=0.501, dtype="float16"),
        near_gelu(root=0.7085, dtype="float16"),
        near_gelu_tanh(0.0448, dtype="float16"),
    ],
    ids=["half", "root", "cubic"],
)
def test_what_is_almost_an_operator_stays_in_half_precision(body):
    mod = spelled(body, "float16")
    tvm.ir.assert_structural_equal(CanonicalizeOperators()(mod), mod)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_constants_of_their_dtype_are_exact(dtype):
    for body, name in ((near_gelu(dtype=dtype), "nn.gelu"), (near_gelu_tanh(dtype=dtype), "nn.gelu_tanh")):
        assert calls(CanonicalizeOperators()(spelled(body, dtype))) == [name]


def test_the_weight_of_a_norm_that_is_widened_before_it_stays():
    """It would be rounded to the norm's dtype."""

    def body(emit, x):
        variance = emit(op.mean(emit(op.multiply(x, x)), [-1], keepdims=True))
        normed = emit(op.multiply(x, emit(op.rsqrt(emit(op.add(variance, number(1e-3, "float16")))))))
        return emit(op.multiply(emit(op.astype(normed, "float32")), weight(8)))

    canonical = CanonicalizeOperators()(spelled(body, "float16"))
    assert [name for name in calls(canonical) if name != "astype"] == ["nn.rms_norm", "multiply"]


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
