"""The canonical order of operators, their kinds, and what is no operator."""

import pytest
from tvm import relax
from tvm.script import relax as R

from relax_passes.fusion.operators import ATTENTION, CI, MI, OperatorGraph
from tests.relax_passes.fusion.modules import encoder_decoder, function_of, gated_mlp, post_norm_layer


def names(graph) -> str:
    return " ".join(operator.name.removeprefix("nn.") for operator in graph.operators)


def test_a_post_norm_layer_is_the_papers_chain():
    graph = OperatorGraph(post_norm_layer()["main"])
    assert names(graph) == (
        "matmul add matmul add matmul add attention_kernel matmul add add layer_norm "
        "matmul add gelu matmul add add layer_norm"
    )
    assert [operator.kind for operator in graph.operators[4:8]] == [CI, MI, ATTENTION, CI]
    attention = graph.operators[6]
    assert attention.inputs == (1, 3, 5) and attention.site
    assert graph.operators[9].inputs == (8,), "the layer's input is no operator"
    assert graph.operators[16].inputs == (10, 15)
    assert graph.readers[10] == {11, 16} and graph.results == {17}


def test_the_order_follows_chains_whatever_the_order_of_bindings():
    """Both branches are written interleaved; depth-first they are whole, the left operand of the product first."""

    @R.function(private=True)
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 8), "float32"), u: R.Tensor((8, 8), "float32")):
        with R.dataflow():
            up = R.matmul(x, u)
            gate = R.matmul(x, w)
            up2 = R.add(up, x)
            active = R.nn.silu(gate)
            out = R.multiply(active, up2)
            R.output(out)
        return out

    assert names(OperatorGraph(main)) == "matmul silu matmul add multiply"


def test_branches_of_a_gated_mlp_are_adjacent():
    graph = OperatorGraph(gated_mlp()["main"])
    assert names(graph) == "rms_norm matmul silu matmul multiply matmul add"
    assert graph.operators[4].inputs == (2, 3)


def test_an_encoder_comes_before_the_decoder_that_reads_it():
    graph = OperatorGraph(encoder_decoder()["main"])
    assert names(graph) == "layer_norm matmul gelu matmul add matmul matmul matmul attention_kernel matmul add"


def test_what_is_long_known_stands_by_its_reader():
    """Adaptive norms: a residual in float32, cast twice from what lies before, and a scale that is made from a time."""

    @R.function(private=True)
    def main(
        x: R.Tensor((64, 8), "float16"),
        time: R.Tensor((1, 8), "float32"),
        w: R.Tensor((8, 8), "float16"),
        u: R.Tensor((8, 8), "float32"),
        one: R.Tensor((8,), "float32"),
    ):
        with R.dataflow():
            stream = R.nn.silu(x)
            kept = R.astype(stream, "float32")
            read = R.astype(stream, "float32")
            normed = R.nn.layer_norm(read, one, one, axes=[-1])
            scale = R.matmul(time, u)
            scaled = R.astype(R.multiply(normed, scale), "float16")
            out = R.add(kept, R.astype(R.matmul(scaled, w), "float32"))
            R.output(out)
        return out

    assert names(OperatorGraph(main)) == "matmul silu astype layer_norm multiply astype matmul astype astype add"


def test_every_order_is_topological_and_every_operator_is_there_once():
    for mod in (post_norm_layer(), gated_mlp(), encoder_decoder()):
        graph = OperatorGraph(mod["main"])
        assert all(j < i for i, operator in enumerate(graph.operators) for j in operator.inputs)
        calls = [b.value for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
        views = ("relax.reshape", "relax.permute_dims", "relax.split")
        assert len(graph.operators) == sum(call.op.name not in views for call in calls)


@R.function(private=True)
def views(x: R.Tensor((2, 16, 8), "float32"), i: R.Tensor((3,), "int64"), c: R.Tensor((2, 8), "float32")):
    with R.dataflow():
        table = R.arange(R.prim_value(0), R.prim_value(8), R.prim_value(1), dtype="float32")
        positions = R.multiply(table, R.const(2.0, "float32"))
        moved = R.permute_dims(x, [0, 2, 1])
        parts = R.split(moved, 2, axis=1)
        half = parts[0]
        flat = R.reshape(half, R.shape([2, 64]))
        act = R.nn.relu(flat)
        first = R.take(x, R.const(0, "int64"), axis=1)
        rows = R.take(first, i, axis=1, mode="clip")
        wide = R.broadcast_to(positions, R.shape([2, 8]))
        total = R.add(c, wide)
        out = (act, rows, total)
        R.output(out)
    return out


def test_views_and_what_depends_on_constants_only_are_no_operators():
    graph = OperatorGraph(views)
    assert names(graph) == "relu take add"
    assert all(operator.kind == MI and not operator.inputs for operator in graph.operators)
    by_name = {var.name: var for var in graph.bindings.values}
    assert not graph.is_view(by_name["act"]) and graph.is_view(by_name["half"]) and by_name["wide"] in graph.closed
    assert [graph.moves_data(by_name[name]) for name in ("moved", "half", "flat", "first")] == [True] * 4


def test_a_transpose_of_single_rows_moves_nothing():
    x = relax.Var("x", relax.TensorType((4, 1, 8), "float32"))
    function = function_of([x], lambda emit: emit(relax.op.permute_dims(emit(relax.op.nn.relu(x)), [1, 0, 2])))
    graph = OperatorGraph(function)
    (view,) = [var for var in graph.bindings.values if graph.bindings.call(var, "permute_dims") is not None][:1]
    assert not graph.moves_data(view)


@pytest.mark.parametrize("depth", [2000])
def test_depth_is_no_problem(depth):
    x = relax.Var("x", relax.TensorType((4,), "float32"))

    def body(emit):
        y = x
        for _ in range(depth):
            y = emit(relax.op.nn.relu(y))
        return y

    assert len(OperatorGraph(function_of([x], body)).operators) == depth
