"""Grouped products in segments: which problem one is, and that it shares no segment with a template."""

import pytest
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
from tir_kernels.fusion.registry import templates_for
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


@pytest.mark.parametrize("before", [True, False])
def test_nothing_beside_it(before):
    x, w, _, offsets = parameters()

    def body(emit):
        operand = emit(op.nn.relu(x)) if before else x
        product = emit(grouped_product(operand, w, offsets, "nk"))
        return product if before else emit(op.nn.relu(product))

    with pytest.raises(NoProblem, match=r"a grouped product beside nn\.relu"):
        match_problem(function_of([x, w, offsets], body))


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
