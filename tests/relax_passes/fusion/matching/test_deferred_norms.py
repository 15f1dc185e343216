"""Which norms are deferred, what the products around them become, and that the model computes the same."""

import json

import numpy as np
import pytest
from tvm import relax

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.partition_segments import SEGMENTS, PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.template_choice import TemplateChooser
from tests.models.quick_llvm import QUICK_LLVM as LLVM
from tests.relax_passes.fusion.fake_templates import template
from tests.relax_passes.fusion.modules import inputs_of, linear, module_of, norm, op, run, weight
from tests.relax_passes.fusion.test_lower_segments import finish
from tir_kernels.fusion.problem import Norm, Step

N = 64
BIAS, RESIDUAL = Step("add", "row"), Step("add", "matrix")


def params(*names, n=N, rows=(2, 3)):
    return [relax.Var(name, relax.TensorType((*rows, n), "float32")) for name in names]


def post_norm_layers(layers=2, kind="layer_norm"):
    """BERT's feed-forward layers, and a product of their input before; scheme of one segment a product, one a norm."""
    a, x = params("a", "x")

    def normed(emit, value, seed):
        return norm(emit, value, seed) if kind == "layer_norm" else rms(emit, value, seed)

    def body(builder):
        emit = builder.emit
        h = normed(emit, emit(op.add(linear(emit, a, N, 9), x)), 8)
        for i in range(layers):
            wide = emit(op.nn.gelu(linear(emit, h, 2 * N, 3 * i)))
            h = normed(emit, emit(op.add(linear(emit, wide, N, 3 * i + 1), h)), 3 * i + 2)
        return linear(emit, h, 24, 7, bias=False)

    return module_of([a, x], body), "000 1 " + "000 111 0 " * layers + "1"


def rms(emit, x, seed):
    return emit(op.nn.rms_norm(x, weight(int(x.ty.shape[-1]), seed=seed), [-1], 1e-6))


def pre_norm_layers(layers=2):
    """LLaMA's: the sum goes on, its norm is read by a gate and what it gates."""
    a, x = params("a", "x")

    def body(builder):
        emit = builder.emit
        total = emit(op.add(x, linear(emit, a, N, 9, bias=False)))
        for i in range(layers):
            h = rms(emit, total, 5 * i)
            gate = emit(op.nn.silu(linear(emit, h, 2 * N, 5 * i + 1, bias=False)))
            wide = emit(op.multiply(gate, linear(emit, h, 2 * N, 5 * i + 2, bias=False)))
            total = emit(op.add(total, linear(emit, wide, N, 5 * i + 3, bias=False)))
        return total

    return module_of([a, x], body), "00 " + "1 00 11 00 " * layers


def lower(made, **options):
    """The lowered module, its rows, and the problems of its kernels in order."""
    mod, digits = made
    problems = {}

    def note(problem):
        problems[problem] = None

    one = template("loops", **{"us": lambda p: 5.0 if p.norm else 1.0, "defers_norms": True, **options})
    original, one.instantiate = one.instantiate, lambda p, *rest: note(p) or original(p, *rest)
    alternating = "".join("01"[i % 2] * len(run) for i, run in enumerate(digits.split()))
    mod = PartitionSegments(FusionScheme(alternating))(mod)
    mod = LowerSegments(TemplateChooser(LLVM, [one]))(mod)
    return mod, json.loads(str(mod.attrs[SEGMENTS])), list(problems)


@pytest.mark.parametrize(
    "make", [post_norm_layers, lambda: post_norm_layers(1, "rms_norm"), pre_norm_layers], ids=["post", "rms", "pre"]
)
def test_the_model_computes_the_same(make):
    made = make()
    values = inputs_of(made[0])
    expected = run(made[0], *values)
    lowered, rows, _ = lower(made)
    norms = [row for row in rows if row["operators"][-1].endswith("norm")]
    assert len(norms) > 1 and {row["kernel"] for row in norms} == {"deferred"}
    for actual, wanted in zip(run(finish(lowered), *values), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)


def test_what_the_products_of_a_post_norm_layer_become():
    _, rows, problems = lower(post_norm_layers(1))
    first, up, down, last = problems
    assert first.statistics and first.steps == (BIAS, RESIDUAL) and first.row_norm is None
    assert up.a_norm == Norm("layer_norm", 1e-5, False, False) and not up.statistics
    assert up.steps == (Step("gelu"),)  # the bias is in what the norm adds
    assert down.statistics and down.steps == (Step("add", "normed", norm=up.a_norm),)
    assert last.a_norm == up.a_norm and last.n == 24
    assert [row["kernel"] for row in rows] == ["loops", "deferred", "loops", "loops", "deferred", "loops"]
    assert rows[1]["reason"] == "its product gives statistics, 2 after it normalise"
    assert rows[3]["reason"].endswith("; normalises its residual (layer_norm); gives statistics of its rows")


def test_the_sum_of_a_pre_norm_layer_goes_on_as_it_is():
    _, _, problems = lower(pre_norm_layers(1))
    first, gate, up, down = problems
    assert first.statistics and gate.a_norm == up.a_norm == Norm("rms_norm", 1e-6, False, False)
    assert down.steps == (RESIDUAL,) and down.row_norm is None


def test_a_bias_that_is_added_after_something_else_stays_a_step():
    a, x = params("a", "x")

    def body(builder):
        emit = builder.emit
        h = norm(emit, emit(op.add(linear(emit, a, N, 9), x)))
        y = emit(op.add(emit(op.nn.relu(linear(emit, h, N, 3, bias=False))), weight(N, seed=3)))
        z = emit(op.add(emit(op.multiply(linear(emit, y, N, 4), relax.const(np.float32(0.5)))), h))
        return z

    made = module_of([a, x], body), "000 1 000 1111"
    values = inputs_of(made[0])
    lowered, rows, problems = lower(made)
    assert rows[1]["kernel"] == "deferred"
    assert [step.kind for step in problems[1].steps] == ["relu", "add"]
    assert [step.kind for step in problems[2].steps] == ["add", "scale", "add"]
    for actual, wanted in zip(run(finish(lowered), *values), run(made[0], *values), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)


def kernels(made, **options):
    return [row["kernel"] for row in lower(made, **options)[1]]


def test_a_norm_that_the_model_returns_has_a_kernel():
    a, x = params("a", "x")
    made = module_of([a, x], lambda b: norm(b.emit, b.emit(op.add(linear(b.emit, a, N), x)))), "000 1"
    assert kernels(made) == ["loops", "loops"]


def test_a_norm_that_something_else_reads_too_has_a_kernel():
    a, x = params("a", "x")

    def body(builder):
        emit = builder.emit
        h = norm(emit, emit(op.add(linear(emit, a, N), x)))
        return emit(op.add(linear(emit, h, N, 3), emit(op.nn.softmax(h, -1))))

    assert kernels((module_of([a, x], body), "000 1 00 1 0"))[1] == "loops"


def test_a_norm_of_an_input_has_a_kernel():
    (x,) = params("x")
    assert kernels((module_of([x], lambda b: linear(b.emit, norm(b.emit, x), N, 2)), "0 11")) == ["loops", "loops"]


def test_a_row_of_no_whole_statistics_has_a_kernel():
    (a,) = params("a")
    made = module_of([a], lambda b: linear(b.emit, norm(b.emit, linear(b.emit, a, 72, 1)), 8, 2)), "00 1 00"
    assert kernels(made) == ["loops"] * 3


def test_a_reshape_between_that_keeps_no_rows_is_no_way_round_the_norm():
    (a,) = params("a", rows=(4, 3))

    def body(builder):
        emit = builder.emit
        h = norm(emit, linear(emit, a, N, 1))
        return linear(emit, emit(op.reshape(h, (6, 2 * N))), 8, 2)

    assert kernels((module_of([a], body), "00 1 00")) == ["loops"] * 3


def test_a_weight_that_others_read_stays_one():
    (a,) = params("a")

    def body(builder):
        emit = builder.emit
        w = weight(N, N, seed=5)
        h = norm(emit, emit(op.matmul(a, w)))
        return emit(op.matmul(h, w))

    assert kernels((module_of([a], body), "0 1 0")) == ["loops"] * 3


def test_a_weight_that_is_something_else_too_stays_one():
    """As an embedding's table, tied to the product that ends a language model."""
    (a,) = params("a", rows=(N,))

    def body(builder):
        emit = builder.emit
        w = weight(N, N, seed=5)
        h = norm(emit, emit(op.matmul(a, weight(N, N, seed=6))))
        return emit(op.add(emit(op.matmul(h, w)), w))

    assert kernels((module_of([a], body), "0 1 00")) == ["loops"] * 3


def test_a_weight_that_would_overflow_stays_as_it_is():
    a = relax.Var("a", relax.TensorType((4, N), "float16"))

    def body(builder, large):
        emit = builder.emit
        w, vector = (relax.const(np.ones(shape, "float16")) for shape in ((N, N), N))
        weight = relax.const(np.full(N, large, "float16"))
        h = emit(op.nn.layer_norm(emit(op.matmul(a, w)), weight, vector, [-1], 1e-5))
        return emit(op.matmul(h, relax.const(np.full((N, 8), 40, "float16"))))

    found = [kernels((module_of([a], lambda b, x=x: body(b, x)), "0 1 0"))[1] for x in (1000, 2000)]
    assert found == ["deferred", "loops"]


def test_a_refusal_of_the_template_is_no_error():
    assert "deferred" not in kernels(post_norm_layers(1), refuses=lambda p: "no" if getattr(p, "a_norm", 0) else None)


@pytest.mark.parametrize("extra_us, expected", [(0.5, "deferred"), (2.5, "loops")])
def test_a_norm_that_is_cheaper_than_its_deferral_has_a_kernel(extra_us, expected):
    """The norm takes 5 µs, and three products are changed."""

    def us(problem):
        return 5.0 if problem.norm else 1.0 + extra_us * getattr(problem, "defers_norm", False)

    assert kernels(post_norm_layers(1), us=us)[1] == expected
