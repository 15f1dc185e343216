"""Attentions become calls of functions that exchange keys; what is known for pairs of tokens only is refused."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.attention.composite import emit_attention
from relax_passes.parallel.share_attentions import ShareAttentions
from tir_kernels.errors import UnsupportedError


def module(**operands) -> tvm.IRModule:
    """Two attentions of heads 4 on 2, one after the other, and an operator between them."""
    builder = relax.BlockBuilder()
    q = relax.Var("q", relax.TensorType((1, 4, 6, 8), "float32"))
    k = relax.Var("k", relax.TensorType((1, 2, 6, 8), "float32"))
    with builder.function("main", [q, k]):
        with builder.dataflow():
            first = emit_attention(builder, q, k, k, scale=0.25, site="first", softcap=3.0, **operands)
            second = emit_attention(builder, builder.emit(relax.op.exp(first)), k, k, scale=0.5, site="second")
            out = builder.emit_output(relax.op.negative(second))
        builder.emit_func_output(out)
    return builder.finalize()


def test_every_attention_becomes_a_call_of_its_own_function():
    found = []

    def name_of(call):
        found.append((call.site, call.scale, call.softcap, call.sink is not None))
        return f"exchange.{call.site}"

    sink = relax.const(np.ones(4, "float32"))
    after = ShareAttentions(name_of)(module(sink=sink))
    assert found == [("first", 0.25, 3.0, True), ("second", 0.5, None, False)]
    (block,) = after["main"].body.blocks
    calls = [binding.value for binding in block.bindings]
    assert [calls[n].args[0].global_symbol for n in (0, 2)] == ["exchange.first", "exchange.second"]
    assert [len(calls[n].args[1].fields) for n in (0, 2)] == [4, 3]
    assert len(after.get_global_vars()) == 1  # the composites are gone


def test_a_module_without_attention_stays_as_it_is():
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.exp(x))
        builder.emit_func_output(out)
    mod = builder.finalize()
    tvm.ir.assert_structural_equal(ShareAttentions(lambda call: "none")(mod), mod)


@pytest.mark.parametrize(
    ("operands", "word"),
    [
        ({"bias": relax.const(np.zeros((1, 1, 6, 6), "float32"))}, "mask or bias"),
        ({"mask": relax.const(np.ones((1, 1, 6, 6), "bool"))}, "mask or bias"),
        ({"causal": "top-left"}, "causal mask"),
        ({"first_row": 0}, "cache"),
        ({"positions": relax.const(np.arange(6))}, "cache"),
    ],
)
def test_operands_for_pairs_of_tokens_are_refused(operands, word):
    with pytest.raises(
        UnsupportedError, match=f"attention 'first' has a {word} that calls compute for pairs of tokens"
    ):
        ShareAttentions(lambda call: "none")(module(**operands))
