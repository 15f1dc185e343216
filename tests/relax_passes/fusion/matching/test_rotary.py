"""Rotary position embedding: which problem a group is, that it computes the same, and why others are none."""

import numpy as np
import pytest
from tvm import relax

from relax_passes.fusion.matching.segment_problem import NoProblem, match_specific
from relax_passes.fusion.operators import OperatorGraph
from tests.relax_passes.fusion.matched_values import assert_match_computes
from tests.relax_passes.fusion.modules import function_of

op = relax.op
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 6, 4, 2, 16
PACKED = (HEADS + 2 * KV_HEADS) * SIZE


def tensor(name, *shape):
    return relax.Var(name, relax.TensorType(shape, "float32"))


def table(seed, batch=1):
    rng = np.random.default_rng(seed)
    return relax.const(rng.standard_normal((batch, 1, LENGTH, SIZE)).astype("float32"))


COS, SIN = table(1), table(2)


def heads(emit, x, count):
    return emit(op.permute_dims(emit(op.reshape(x, (BATCH, LENGTH, count, SIZE))), [0, 2, 1, 3]))


def rotated(emit, x, cos=COS, sin=SIN, swapped=False, half=SIZE // 2):
    low = emit(op.strided_slice(x, [3], [0], [half]))
    high = emit(op.strided_slice(x, [3], [half], [2**63 - 1]))
    turned = emit(op.concat([emit(op.negative(high)), low], -1))
    products = [emit(op.multiply(x, cos)), emit(op.multiply(turned, sin))]
    return emit(op.add(*(products[::-1] if swapped else products)))


def packed_body(x, **how):
    def body(emit):
        parts = emit(op.split(x, [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], -1))
        q = heads(emit, emit(relax.TupleGetItem(parts, 0)), HEADS)
        k = heads(emit, emit(relax.TupleGetItem(parts, 1)), KV_HEADS)
        return relax.Tuple([rotated(emit, q, **how), rotated(emit, k, **how)])

    return body


def random(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("swapped", [False, True])
def test_a_packed_projection_is_read_in_place(swapped):
    x = tensor("x", BATCH, LENGTH, PACKED)
    function = function_of([x], packed_body(x, swapped=swapped))
    problem = assert_match_computes(function, [random(BATCH, LENGTH, PACKED)]).problem
    assert (problem.batch, problem.length, problem.heads, problem.kv_heads) == (BATCH, LENGTH, HEADS, KV_HEADS)
    assert (problem.packed_heads, problem.table_batch, problem.out_layout) == (PACKED // SIZE, 1, "bhsd")


def test_query_and_key_of_their_own():
    q, k = tensor("q", BATCH, LENGTH, HEADS * SIZE), tensor("k", BATCH, LENGTH, KV_HEADS * SIZE)

    def body(emit):
        return relax.Tuple([rotated(emit, heads(emit, x, n)) for x, n in ((q, HEADS), (k, KV_HEADS))])

    values = [random(BATCH, LENGTH, HEADS * SIZE), random(BATCH, LENGTH, KV_HEADS * SIZE)]
    assert assert_match_computes(function_of([q, k], body), values).problem.packed_heads is None


def test_angles_of_each_sequence():
    x = tensor("x", BATCH, LENGTH, PACKED)
    function = function_of([x], packed_body(x, cos=table(4, BATCH), sin=table(5, BATCH)))
    assert assert_match_computes(function, [random(BATCH, LENGTH, PACKED)]).problem.table_batch == BATCH


def reason(params, body) -> str:
    with pytest.raises(NoProblem) as error:
        match_specific(OperatorGraph(function_of(params, body)))
    return str(error.value)


def test_what_is_no_rotation_of_query_and_key_says_why():
    x = tensor("x", BATCH, LENGTH, PACKED)
    alone = lambda emit: rotated(emit, heads(emit, x, PACKED // SIZE))
    assert "5 operators" in reason([x], alone)
    assert "its own halves" in reason([x], packed_body(x, half=4))

    def keys_first(emit):
        parts = emit(op.split(x, [KV_HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], -1))
        q = heads(emit, emit(relax.TupleGetItem(parts, 1)), HEADS)
        k = heads(emit, emit(relax.TupleGetItem(parts, 0)), KV_HEADS)
        return relax.Tuple([rotated(emit, q), rotated(emit, k)])

    assert "neither a tensor of its own nor packed after queries" in reason([x], keys_first)

    def two_angles(emit):
        parts = emit(op.split(x, [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], -1))
        q, k = (heads(emit, emit(relax.TupleGetItem(parts, i)), n) for i, n in enumerate((HEADS, KV_HEADS)))
        return relax.Tuple([rotated(emit, q), rotated(emit, k, cos=table(7))])

    assert "different angles" in reason([x], two_angles)


def test_angles_of_each_head_are_not_taken_for_those_of_each_sequence():
    """As many heads as sequences: the tables have the size of the other."""
    x = tensor("x", BATCH, LENGTH, 4 * BATCH * SIZE)
    rng = np.random.default_rng(8)
    cos, sin = (relax.const(rng.standard_normal((1, BATCH, LENGTH, SIZE)).astype("float32")) for _ in range(2))

    def body(emit):
        parts = emit(op.split(x, [BATCH * SIZE, 2 * BATCH * SIZE], -1))
        q, k = (heads(emit, emit(relax.TupleGetItem(parts, i)), BATCH) for i in range(2))
        return relax.Tuple([rotated(emit, q, cos, sin), rotated(emit, k, cos, sin)])

    assert "cosines of" in reason([x], body)
