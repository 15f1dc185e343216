"""Grouped products in segments: which problem one is, what may follow it, and what shares no segment with it."""

import numpy as np
import pytest
import torch
from tvm import relax

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.matching.segment_problem import NoProblem, match_problem
from relax_passes.fusion.operators import CI, OperatorGraph
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.operators.grouped_products import grouped_product
from relax_passes.report_rows import segment_rows
from tests.relax_passes.fusion.modules import function_of, module_of
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import Step
from tir_kernels.fusion.registry import templates_for
from tir_kernels.problems.grouped import reference
from tir_kernels.target import parse_target

op = relax.op
CUDA = parse_target("cuda -arch=sm_80")


def parameters(dtype="float16", k=64, n=128):
    specs = {"x": ((96, k), dtype), "w": ((4, n, k), dtype), "v": ((4, k, n // 2), dtype), "offsets": ((4,), "int32")}
    return [relax.Var(name, relax.TensorType(*spec)) for name, spec in specs.items()]


def experts(x, w, v, offsets):
    """Two products, and between them an activation that gates, as transformers' experts have it."""

    def body(emit):
        both = emit(op.split(emit(grouped_product(x, w, offsets, "nk")), 2, -1))
        gate, up = (emit(relax.TupleGetItem(both, i)) for i in range(2))
        return emit(grouped_product(emit(op.multiply(emit(op.nn.silu(gate)), up)), v, offsets, "nk"))

    return body


def test_a_product_alone():
    x, w, _, offsets = parameters()
    function = function_of([x, w, offsets], lambda emit: emit(grouped_product(x, w, offsets, "nk")))
    match = match_problem(function)
    assert match.problem == GroupedProblem(96, 128, 64, 4, "float16")
    assert OperatorGraph(function).operators[0].kind == CI


def test_nothing_before_it():
    x, w, _, offsets = parameters()
    body = lambda emit: emit(grouped_product(emit(op.nn.relu(x)), w, offsets, "nk"))
    with pytest.raises(NoProblem, match=r"a grouped product beside nn\.relu"):
        match_problem(function_of([x, w, offsets], body))


def test_steps_without_operands_follow_it():
    x, w, _, offsets = parameters()

    def body(emit):
        product = emit(op.astype(emit(grouped_product(x, w, offsets, "nk")), "float32"))
        scaled = emit(op.multiply(emit(op.nn.gelu(product)), relax.const(0.5, "float32")))
        return emit(op.astype(scaled, "float16"))

    match = match_problem(function_of([x, w, offsets], body))
    steps = (Step("gelu"), Step("scale", value=0.5))
    assert match.problem == GroupedProblem(96, 128, 64, 4, "float16", steps=steps)
    assert [a.same_as(b) for a, b in zip(match.inputs, (x, w, offsets), strict=True)] == [True] * 3


def halves(emit, product):
    both = emit(op.split(product, 2, -1))
    return [emit(relax.TupleGetItem(both, i)) for i in range(2)]


def every_other(emit, product):
    return [emit(op.strided_slice(product, [1], [i], [product.ty.shape[1]], [2])) for i in range(2)]


def gated(cut, layout="nk", dtype="float16", swap=False, k=64, n=64):
    """x, offsets and f(gate) * value of a product with constant weights; the weights."""
    shape = (4, 2 * n, k) if layout == "nk" else (4, k, 2 * n)
    array = np.random.default_rng(0).standard_normal(shape).astype("float32") * k**-0.5
    w = relax.const(array.astype("float16"), "float16") if dtype == "float16" else relax.const(array)
    x = relax.Var("x", relax.TensorType((96, k), dtype))
    offsets = relax.Var("offsets", relax.TensorType((4,), "int32"))

    def body(emit):
        gate, value = cut(emit, emit(grouped_product(x, w, offsets, layout)))
        gate, value = (value, gate) if swap else (gate, value)
        return emit(op.multiply(value, emit(op.nn.silu(gate))))

    return [x, offsets], body, array


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("cut", [halves, every_other])
def test_a_gate_of_any_even_cut(cut, swap, layout):
    """The problem with the weights in its order computes what the operators do."""
    parameters, body, array = gated(cut, layout, swap=swap)
    match = match_problem(function_of(parameters, body))
    assert match.problem == GroupedProblem(96, 64, 64, 4, "float16", layout, gate="silu")
    x = torch.randn((96, 64), dtype=torch.float64)
    offsets, w = torch.tensor([10, 10, 70, 96]), torch.tensor(array, dtype=torch.float64)
    plain = GroupedProblem(96, 128, 64, 4, "float16", layout)
    (product,) = reference(plain, [x, w, offsets], torch)
    parts = product.chunk(2, 1) if cut is halves else (product[:, ::2], product[:, 1::2])
    gate, value = parts[::-1] if swap else parts
    arranged = torch.tensor(match.arranged(array, -2 if layout == "nk" else -1), dtype=torch.float64)
    (actual,) = reference(match.problem, [x, arranged, offsets], torch)
    torch.testing.assert_close(actual, torch.nn.functional.silu(gate) * value)


def test_a_gate_gets_one_kernel_with_the_weights_in_its_order():
    parameters, body, array = gated(halves)
    chooser = TemplateChooser(CUDA, templates_for(CUDA))
    mod = PartitionSegments(InitialScheme(chooser))(module_of(parameters, lambda builder: body(builder.emit)))
    (row,) = segment_rows(LowerSegments(chooser)(mod))
    assert row.kernel == "grouped" and row.operators == ("grouped_linear", "silu", "multiply")


def test_gates_that_are_none():
    """Weights that are not known, float32, quarters, an operand between, a gate that multiplies itself."""
    x, w, _, offsets = parameters()
    for params, body, why in (
        ([x, w, offsets], lambda emit: gate_of(emit, grouped_product(x, w, offsets, "nk")), "are not known"),
        (*gated(halves, dtype="float32")[:2], "a grouped product of float32 is alone"),
        (*gated(lambda emit, p: halves(emit, halves(emit, p)[0]))[:2], "changes the shape"),
        (*gated(lambda emit, p: halves(emit, emit(op.add(p, p))))[:2], "does not take the chain's value once"),
        (*gated(lambda emit, p: halves(emit, p)[:1] * 2)[:2], "multiplies no others"),
        (*gated(halves, n=20)[:2], "multiplies no others"),  # columns alternate by 8
    ):
        with pytest.raises(NoProblem, match=why):
            match_problem(function_of(params, body))


def gate_of(emit, product):
    gate, value = halves(emit, emit(product))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


@pytest.mark.parametrize("operand", ["row", "matrix"])
def test_no_operand_of_a_step(operand):
    x, w, _, offsets = parameters()
    other = relax.Var("other", relax.TensorType((128,) if operand == "row" else (96, 128), "float16"))
    body = lambda emit: emit(op.add(emit(grouped_product(x, w, offsets, "nk")), other))
    with pytest.raises(NoProblem, match="an operator with an operand of its own"):
        match_problem(function_of([x, w, offsets, other], body))


def test_a_product_that_is_read_elsewhere_too_is_alone():
    x, w, _, offsets = parameters()

    def body(builder):
        product = builder.emit(grouped_product(x, w, offsets, "nk"))
        return relax.Tuple([product, builder.emit(op.nn.relu(product))])

    chooser = TemplateChooser(CUDA, templates_for(CUDA))
    mod = PartitionSegments(InitialScheme(chooser))(module_of([x, w, offsets], body))
    assert [row.operators for row in segment_rows(mod)] == [("grouped_linear",), ("relu",)]


@pytest.mark.parametrize(
    "dtype, kernel", [("float16", "grouped"), ("bfloat16", "grouped"), ("float32", "grouped-simt")]
)
def test_experts_are_two_products_and_an_elementwise_group(dtype, kernel):
    params = parameters(dtype, k=64, n=128)
    chooser = TemplateChooser(CUDA, templates_for(CUDA))
    mod = PartitionSegments(InitialScheme(chooser))(module_of(params, lambda builder: experts(*params)(builder.emit)))
    rows = segment_rows(LowerSegments(chooser)(mod))
    assert [row.operators for row in rows] == [("grouped_linear",), ("silu", "multiply"), ("grouped_linear",)]
    assert [row.kernel for row in rows][::2] == [kernel, kernel]
    if dtype != "float32":
        assert rows[1].kernel == "group"
