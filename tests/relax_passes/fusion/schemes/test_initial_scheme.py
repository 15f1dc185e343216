"""The analytical scheme: TVM's own fusion without templates, and templates where they are predicted to be faster."""

import itertools

import pytest
import tvm
from tvm import relax

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, check_scheme, is_legal
from relax_passes.fusion.schemes.initial_scheme import InitialScheme, default_kernels
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.runtime.rewrite_reshapes import RewriteReshapes
from relax_passes.schedule.cpu import cpu_passes
from tests.relax_passes.fusion.fake_templates import template
from tests.relax_passes.fusion.modules import encoder_decoder, gated_mlp, post_norm_layer, pre_norm_mlp
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.target import parse_target

LLVM = parse_target("llvm")
MODULES = [post_norm_layer, pre_norm_mlp, gated_mlp, encoder_decoder]


def initial(mod, templates=()) -> str:
    graph = OperatorGraph(mod["main"])
    scheme = InitialScheme(TemplateChooser(LLVM, list(templates)))(graph)
    check_scheme(scheme, graph.operators)
    return str(scheme)


def gemm_us(problem, plain=1.0, with_norm=1.5):
    """Time of a template that takes longer where it has to normalise."""
    return with_norm if problem.norm is not None else plain


@pytest.mark.parametrize("make", MODULES)
def test_is_legal(make):
    initial(make())
    initial(make(), [template()])


def test_a_layer_is_five_kernels_where_templates_fuse_the_norms():
    """With one packed projection: it, attention, projection + residual + norm, linear + GELU, linear + ... + norm."""
    assert initial(post_norm_layer(), [template(us=gemm_us)]) == "00 11 00 1 0000 111 0000"


def test_a_norm_is_fused_with_its_product_only_where_that_is_faster():
    """1.5 against 1 + 1 us pays, 2.5 does not."""
    slow = template(us=lambda problem: gemm_us(problem, with_norm=2.5 if isinstance(problem, GemmProblem) else 1.0))
    assert initial(post_norm_layer(), [slow]) == "00 11 00 1 000 1 000 111 0"


def test_what_only_measuring_may_choose_is_not_proposed():
    """However fast it is predicted to be."""
    products_alone = template(refuses=lambda p: "norms are another's" if p.norm else None)
    fused = template("fused", is_proposed=False, us=0.1)
    scheme = initial(post_norm_layer(), [products_alone, fused])
    assert "layer_norm" not in _segments_of_products(post_norm_layer(), scheme)


def _segments_of_products(mod, scheme) -> set[str]:
    """The operators that share a segment with a product."""
    operators = OperatorGraph(mod["main"]).operators
    segments = [[operators[i].name for i in segment] for segment in FusionScheme(scheme).segments]
    return {name.removeprefix("nn.") for names in segments if "matmul" in names for name in names}


def test_a_template_slower_than_the_default_is_not_proposed_for_maps():
    """The sum and the norm alone: nothing is gained by a kernel of 100 us."""
    slow = template(us=100.0)
    fast = template(us=0.1)
    assert initial(pre_norm_mlp(), [slow]) != initial(pre_norm_mlp(), [fast])


@pytest.mark.parametrize("make", [pre_norm_mlp, gated_mlp])
def test_no_legal_scheme_is_cheaper(make):
    """Dynamic programming against all schemes."""
    graph = OperatorGraph(make()["main"])
    model = InitialScheme(TemplateChooser(LLVM, [template(us=gemm_us)]))
    best = model(graph)
    count = len(graph.operators)
    schemes = (FusionScheme("0" + "".join(rest)) for rest in itertools.product("01", repeat=count - 1))
    costs = {s: sum(model.predict(graph, run) for run in s.segments) for s in schemes if is_legal(s, graph.operators)}
    assert costs[best] == pytest.approx(min(costs.values()))


def test_maps_join_the_product_that_they_alone_read():
    graph = OperatorGraph(post_norm_layer()["main"])
    assert default_kernels(graph, range(7, 14)) == [{7, 8, 9}, {10}, {11, 12, 13}]
    assert default_kernels(graph, range(8, 10)) == [{8, 9}]
    rope = OperatorGraph(gated_mlp()["main"])
    assert default_kernels(rope, range(1, 5)) == [{1, 2}, {3, 4}], "a product joins no other"


@pytest.mark.parametrize("make", MODULES)
def test_without_templates_as_few_kernels_as_fusion_without_borders(make):
    mod = make()
    scheme = InitialScheme(TemplateChooser(LLVM, []))
    passes = [PartitionSegments(scheme), LowerSegments(TemplateChooser(LLVM, []))]
    assert count_kernels(mod, passes) <= count_kernels(mod, [])


def count_kernels(mod, passes) -> int:
    """Kernels that one call runs, views apart."""
    with LLVM:
        mod = tvm.transform.Sequential([*passes, *cpu_passes(LLVM), RewriteReshapes()])(mod)
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return sum(isinstance(v, relax.Call) and v.op == tvm.ir.Op.get("relax.call_tir") for v in values)
