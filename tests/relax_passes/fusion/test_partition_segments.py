"""Partition: before and expected modules, what is refused, and that nothing changes what is computed."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.partition_segments import SCHEME, SEGMENT, PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.report_rows import SEGMENTS, segment_rows
from tests.relax_passes.fusion.modules import (
    encoder_decoder,
    gated_mlp,
    inputs_of,
    module_of,
    post_norm_layer,
    pre_norm_mlp,
    run,
)
from tir_kernels.errors import SchemeError
from tir_kernels.report_rows import SegmentRow


def partition(mod, text):
    return PartitionSegments(FusionScheme(text))(mod)


def bare(mod):
    return mod.without_attr(SCHEME).without_attr(SEGMENTS)


@I.ir_module
class TwoResults:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), y: R.Tensor((4, 8), "float32"), g: R.Tensor((8,), "float32")):
        with R.dataflow():
            total = R.add(x, y)
            normed = R.nn.rms_norm(total, g, axes=[-1], epsilon=1e-6)
            act = R.nn.relu(normed)
            out = R.add(total, act)
            R.output(out)
        return out


@I.ir_module
class TwoResultsPartitioned:
    @R.function(private=True)
    def segment0_add_rms_norm(
        x: R.Tensor((4, 8), "float32"), y: R.Tensor((4, 8), "float32"), g: R.Tensor((8,), "float32")
    ):
        R.func_attr({"Primitive": True, "stof.segment": 0})
        with R.dataflow():
            total = R.add(x, y)
            normed = R.nn.rms_norm(total, g, axes=[-1], epsilon=1e-6)
            both = (total, normed)
            R.output(both)
        return both

    @R.function(private=True)
    def segment1_relu_add(normed: R.Tensor((4, 8), "float32"), total: R.Tensor((4, 8), "float32")):
        R.func_attr({"Primitive": True, "stof.segment": 1})
        with R.dataflow():
            act = R.nn.relu(normed)
            out = R.add(total, act)
            R.output(out)
        return out

    @R.function
    def main(x: R.Tensor((4, 8), "float32"), y: R.Tensor((4, 8), "float32"), g: R.Tensor((8,), "float32")):
        cls = TwoResultsPartitioned
        with R.dataflow():
            both = cls.segment0_add_rms_norm(x, y, g)
            total = both[0]
            normed = both[1]
            out = cls.segment1_relu_add(normed, total)
            R.output(out)
        return out


def test_a_segment_with_two_results_returns_a_tuple():
    mod = partition(TwoResults, "00 11")
    tvm.ir.assert_structural_equal(bare(mod), TwoResultsPartitioned)
    assert str(mod.attrs[SCHEME]) == FusionScheme("0011").hex
    assert segment_rows(mod) == [SegmentRow(0, ("add", "rms_norm")), SegmentRow(1, ("relu", "add"))]


@I.ir_module
class Views:
    @R.function
    def main(x: R.Tensor((2, 4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            flat = R.reshape(x, R.shape([8, 8]))
            product = R.matmul(flat, w)
            back = R.reshape(product, R.shape([2, 4, 8]))
            moved = R.permute_dims(back, [1, 0, 2])
            act = R.nn.relu(moved)
            slices = R.split(act, 2, axis=2)
            first = slices[0]
            second = slices[1]
            out = (first, second)
            R.output(out)
        return out


@I.ir_module
class ViewsPartitioned:
    @R.function(private=True)
    def segment0_matmul(flat: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        R.func_attr({"Primitive": True, "stof.segment": 0})
        with R.dataflow():
            product = R.matmul(flat, w)
            R.output(product)
        return product

    @R.function(private=True)
    def segment1_relu(back: R.Tensor((2, 4, 8), "float32")):
        R.func_attr({"Primitive": True, "stof.segment": 1})
        with R.dataflow():
            moved = R.permute_dims(back, [1, 0, 2])
            act = R.nn.relu(moved)
            slices = R.split(act, 2, axis=2)
            first = slices[0]
            second = slices[1]
            both = (first, second)
            R.output(both)
        return both

    @R.function
    def main(x: R.Tensor((2, 4, 8), "float32"), w: R.Tensor((8, 8), "float32")):
        cls = ViewsPartitioned
        with R.dataflow():
            flat = R.reshape(x, R.shape([8, 8]))
            product = cls.segment0_matmul(flat, w)
            back = R.reshape(product, R.shape([2, 4, 8]))
            both = cls.segment1_relu(back)
            first = both[0]
            second = both[1]
            out = (first, second)
            R.output(out)
        return out


def test_reshapes_stay_outside_and_views_that_move_data_ride_with_maps():
    tvm.ir.assert_structural_equal(bare(partition(Views, "0 1")), ViewsPartitioned)


def test_views_between_two_operators_of_a_segment_are_inside():
    mod = partition(Views, "0 0")
    (group,) = [f for name, f in mod.functions_items() if name.name_hint != "main"]
    kinds = [b.value.op.name for b in group.body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert kinds == ["relax.matmul", "relax.reshape", "relax.permute_dims", "relax.nn.relu"]
    assert str(group.params[0].ty.shape) == "R.shape([8, 8])", "the reshape before the product stays outside"


def test_constants_and_their_transposes_are_inside():
    mod = partition(gated_mlp(), "0 00 11 00")
    for name, function in mod.functions_items():
        if name.name_hint != "main":
            assert all(tuple(param.ty.shape)[:2] == (2, 4) for param in function.params)


def test_attention_stays_a_call_in_main():
    mod = partition(post_norm_layer(), "00 11 00 1 0000 111 0000")
    calls = [b.value for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    names = [call.op.name if isinstance(call.op, tvm.ir.Op) else call.op.name_hint for call in calls]
    assert names.index("relax.call_tir") == 6, "after three projections and their reshapes"
    assert len([name for name in names if name.startswith("segment")]) == 6
    numbers = [int(f.attrs[SEGMENT]) for f in mod.functions.values() if f.attrs and SEGMENT in f.attrs]
    assert sorted(numbers) == [0, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("make", [post_norm_layer, pre_norm_mlp, gated_mlp, encoder_decoder])
def test_finest_and_widest_segments_compute_the_same(make):
    mod = make()
    operators = OperatorGraph(mod["main"]).operators
    values = inputs_of(mod)
    expected = run(mod, *values)
    finest = FusionScheme.from_lengths([1] * len(operators))
    for text in (str(finest), widest(operators)):
        actual = run(_inlined(partition(mod, text)), *values)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def widest(operators) -> str:
    """Segments grown from the left as far as is legal."""
    from relax_passes.fusion.schemes.moves import expand

    scheme = FusionScheme.from_lengths([1] * len(operators))
    while merged := expand(scheme, operators):
        scheme = merged[0]
    assert len(scheme.segments) < len(operators)
    return str(scheme)


def _inlined(mod):
    mod = mod.clone()
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod.update_func(name, function.without_attr("Primitive"))
    return relax.transform.InlinePrivateFunctions()(mod)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("00", "2 digits for 4 operators: operator #2 'nn.relu' has none"),
        ("00000", "5 digits for 4 operators"),
    ],
)
def test_a_scheme_of_another_length_is_refused(text, rule):
    with pytest.raises(SchemeError, match=rule):
        partition(TwoResults, text)


def test_an_attention_in_a_wider_segment_is_refused():
    with pytest.raises(SchemeError, match="operator #5 'add' shares a segment with an attention"):
        partition(post_norm_layer(), "00 11 0 11" + "0" * 11)


def sums_with_parts():
    """Two sums that are results, and a part of each, read by a product."""
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    w = relax.Var("w", relax.TensorType((4, 4), "float32"))

    def body(builder):
        sums = [builder.emit(relax.op.add(x, relax.const(np.full((2, 8), 1, "float32"))))]
        sums.append(builder.emit(relax.op.add(sums[0], x)))
        found = []
        for i, total in enumerate(sums):
            part = builder.emit(relax.TupleGetItem(builder.emit(relax.op.split(total, 2, axis=1)), i))
            found.append(builder.emit(relax.op.matmul(part, w)))
        return relax.Tuple([*sums[::-1], *found])

    return module_of([x, w], body)


@pytest.mark.parametrize("most, results", [(9, 4), (3, 3), (2, 2), (1, 4)])
def test_a_segment_carries_views_while_it_has_a_template(most, results):
    """As many as its template has results for; all of them where it has none anyway."""

    def has_template(function) -> bool:
        ty = function.ret_ty
        return (len(ty.fields) if isinstance(ty, relax.TupleType) else 1) <= most

    mod = sums_with_parts()
    assert [operator.name for operator in OperatorGraph(mod["main"]).operators] == ["add", "add", "matmul", "matmul"]
    partitioned = PartitionSegments(FusionScheme("0010"), has_template)(mod)
    (first,) = (f for v, f in partitioned.functions.items() if v.name_hint.startswith("segment0"))
    assert len(first.ret_ty.fields) == results
    inputs = inputs_of(mod)
    for actual, expected in zip(run(partitioned, *inputs), run(mod, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
