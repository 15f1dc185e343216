"""Projections that meet in one attention become one product; others stay."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.attention.composite import emit_attention
from relax_passes.fusion.merging.merge_projections import MergeProjections
from tests.relax_passes.fusion.modules import (
    HEADS,
    SIZE,
    WIDTH,
    B,
    S,
    activations,
    gated_mlp,
    inputs_of,
    linear,
    module_of,
    run,
    weight,
)

op = relax.op


def attention_module(kv_heads=HEADS, biases=(True, True, True), source=None, transposed=True):
    """main(x[, source]) = attention of three projections; k and v read `source` where it is given."""
    x = activations()
    params = [x] if source is None else [x, source]

    def project(emit, value, n, seed, bias):
        if transposed:
            return linear(emit, value, n, seed, bias)
        product = emit(op.matmul(value, weight(WIDTH, n, seed=seed)))
        return emit(op.add(product, weight(n, seed=seed))) if bias else product

    def body(builder):
        emit = builder.emit
        operands = []
        for seed, heads in enumerate((HEADS, kv_heads, kv_heads)):
            value = x if seed == 0 or source is None else source
            flat = project(emit, value, heads * SIZE, seed, biases[seed])
            operands.append(emit(op.permute_dims(emit(op.reshape(flat, (B, S, heads, SIZE))), [0, 2, 1, 3])))
        out = emit_attention(builder, *operands, site="a")
        return emit(op.reshape(emit(op.permute_dims(out, [0, 2, 1, 3])), (B, S, WIDTH)))

    return module_of(params, body)


def products(mod) -> list[tuple[int, ...]]:
    values = [b.value for b in mod["main"].body.blocks[0].bindings]
    calls = [v for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]
    return [tuple(int(n) for n in call.ty.shape) for call in calls if call.op.name == "relax.matmul"]


@pytest.mark.parametrize(
    "kv_heads, biases, transposed",  # every pair of two parameters' values
    [
        (HEADS, (True, True, True), True),
        (1, (True, True, True), False),
        (HEADS, (False, False, False), False),
        (1, (False, False, False), True),
        (HEADS, (True, False, True), False),
        (1, (True, False, True), True),
    ],
)
def test_three_projections_become_one(kv_heads, biases, transposed):
    mod = attention_module(kv_heads, biases, transposed=transposed)
    merged = MergeProjections()(mod)
    assert products(merged) == [(B, S, WIDTH + 2 * kv_heads * SIZE)]
    values = inputs_of(mod)
    np.testing.assert_allclose(run(merged, *values)[0], run(mod, *values)[0], atol=1e-6)


def test_the_merged_weight_is_packed_at_compile_time():
    merged = MergeProjections()(attention_module())
    values = [b.value for b in merged["main"].body.blocks[0].bindings]
    names = [v.op.name for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]
    assert "relax.concat" not in names and names.count("relax.add") == 1


def test_cross_attention_merges_keys_and_values():
    source = relax.Var("source", relax.TensorType((B, S, WIDTH), "float32"))
    mod = attention_module(source=source)
    merged = MergeProjections()(mod)
    assert products(merged) == [(B, S, WIDTH), (B, S, 2 * WIDTH)]
    values = inputs_of(mod)
    np.testing.assert_allclose(run(merged, *values)[0], run(mod, *values)[0], atol=1e-6)


def test_half_precision_stays_so():
    x = relax.Var("x", relax.TensorType((B, S, WIDTH), "bfloat16"))

    def body(builder):
        heads = []
        for seed in range(3):
            w = relax.const(weight(WIDTH, WIDTH, seed=seed).value.numpy(), "bfloat16")
            flat = builder.emit(op.matmul(x, builder.emit(op.permute_dims(w))))
            heads.append(
                builder.emit(op.permute_dims(builder.emit(op.reshape(flat, (B, S, HEADS, SIZE))), [0, 2, 1, 3]))
            )
        return emit_attention(builder, *heads, site="a")

    merged = MergeProjections()(module_of([x], body))
    assert products(merged) == [(B, S, 3 * WIDTH)]


def test_a_gate_and_its_values_stay():
    mod = gated_mlp()
    tvm.ir.assert_structural_equal(MergeProjections()(mod), mod)


def test_projections_that_are_results_stay():
    x = activations()

    def body(builder):
        first = linear(builder.emit, x, WIDTH)
        return relax.Tuple([first, linear(builder.emit, x, WIDTH, 1)])

    mod = module_of([x], body)
    tvm.ir.assert_structural_equal(MergeProjections()(mod), mod)
