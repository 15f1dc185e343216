"""Gated products: f(gate) * values of one product's columns, however they are cut."""

import re

import numpy as np
import pytest
from tvm import relax

from relax_passes.fusion.matching.segment_problem import NoProblem, match_specific
from relax_passes.fusion.operators import OperatorGraph
from tests.relax_passes.fusion.modules import function_of, module_of, run
from tir_kernels.fusion.problem import GemmProblem, Step
from tir_kernels.fusion.reference import fusion_reference

op = relax.op
DTYPE = "float16"
M, N, K = 8, 16, 32
A = relax.Var("a", relax.TensorType((2, 4, K), DTYPE))
R = relax.Var("r", relax.TensorType((2, 4, N), DTYPE))


def constant(*shape):
    return relax.const(np.random.default_rng(list(shape)).normal(size=shape).astype(DTYPE))


def product(emit, bias=True, a=A):
    x = emit(op.matmul(a, emit(op.permute_dims(constant(2 * N, K)))))
    return emit(op.add(x, constant(2 * N))) if bias else x


def chunks(emit, x):
    both = emit(op.split(x, 2, axis=-1))
    return [emit(relax.TupleGetItem(both, i)) for i in (0, 1)]


def slices(emit, x):
    return [emit(op.strided_slice(x, [2], [begin], [begin + N])) for begin in (0, N)]


def interleaved(emit, x):
    return [emit(op.strided_slice(x, [2], [begin], [2 * N], [2])) for begin in (0, 1)]


def rows_cut(emit, x):
    """Cut as (8, 32) and read as (2, 4, 16)."""
    return [emit(op.reshape(half, (2, 4, N))) for half in chunks(emit, emit(op.reshape(x, (M, 2 * N))))]


def in_pairs(emit, x):
    """x.view(…, n, 2).unbind(-1)."""
    pairs = emit(op.reshape(x, (2, 4, N, 2)))
    return [emit(op.squeeze(emit(op.strided_slice(pairs, [3], [i], [i + 1])), [3])) for i in (0, 1)]


def in_two_rows(emit, x):
    """x.view(…, 2, n) cut along the 2, and read as (8, 16)."""
    both = emit(op.split(emit(op.reshape(x, (2, 4, 2, N))), 2, axis=2))
    return [emit(op.reshape(emit(relax.TupleGetItem(both, i)), (M, N))) for i in (0, 1)]


def of_heads(emit, x):
    """Halves of each of four heads, not of a row."""
    both = emit(op.split(emit(op.reshape(x, (2, 4, 4, N // 2))), 2, axis=-1))
    return [emit(relax.TupleGetItem(both, i)) for i in (0, 1)]


def by_eights(emit, x):
    """Eight of the gate and eight of the values in turn, as the problem's own columns."""
    parts = emit(op.reshape(x, (2, 4, N // 8, 2, 8)))
    return [emit(op.reshape(emit(op.strided_slice(parts, [3], [i], [i + 1])), (2, 4, N))) for i in (0, 1)]


HALVES, PAIRS = (range(N), range(N, 2 * N)), (range(0, 2 * N, 2), range(1, 2 * N, 2))
HEADS, EIGHTS = ([tuple(c for c in range(2 * N) if c // size % 2 == i) for i in (0, 1)] for size in (4, 8))


def match(params, body):
    return match_specific(OperatorGraph(function_of(params, body)))


CUTS = [
    (chunks, HALVES),
    (slices, HALVES),
    (rows_cut, HALVES),
    (in_two_rows, HALVES),
    (interleaved, PAIRS),
    (in_pairs, PAIRS),
    (of_heads, tuple(HEADS)),
    (by_eights, tuple(EIGHTS)),
]


@pytest.mark.parametrize("cut, columns", CUTS)
@pytest.mark.parametrize("first", [True, False], ids=["the gate is first", "the gate is last"])
@pytest.mark.parametrize("bias", [True, False])
def test_halves_of_a_product(cut, columns, first, bias):
    def body(emit):
        gate, value = cut(emit, product(emit, bias))[:: 1 if first else -1]
        gated = emit(op.nn.silu(gate))
        return emit(op.multiply(gated, value) if first else op.multiply(value, gated))

    found = match([A], body)
    assert found.problem == GemmProblem(M, N, DTYPE, k=K, gate="silu", gate_bias=bias)
    assert found.gate == (columns if first else columns[::-1]) and len(found.inputs) == 2 + bias
    arranged = found.arranged(np.arange(2 * N), 0)
    gate, value = (list(part) for part in found.gate)
    assert list(arranged) == gate[:8] + value[:8] + gate[8:] + value[8:]
    assert found.is_arranged is (first and cut is by_eights)


@pytest.mark.parametrize("cut", [cut for cut, _ in CUTS])
def test_the_numbers_are_those_of_the_segment(cut):
    """The problem, of constants as they are arranged, beside the segment's own operators."""

    def body(emit):
        gate, value = cut(emit, product(emit))
        return emit(op.multiply(emit(op.nn.silu(gate)), value))

    found = match([A], body)
    a = np.random.default_rng(7).normal(size=(2, 4, K)).astype(DTYPE)
    w, bias = (found.arranged(x.value.numpy(), 0) for x in found.inputs[1:])
    (expected,) = fusion_reference(found.problem, a.reshape(M, K), w, bias)
    (actual,) = run(module_of([A], lambda builder: body(builder.emit)), a)
    np.testing.assert_allclose(actual.reshape(M, N), expected, rtol=0.02, atol=0.05)
    assert np.abs(expected).max() > 1


def test_what_follows_are_steps():
    def body(emit):
        gate, value = chunks(emit, product(emit))
        return emit(op.add(emit(op.multiply(emit(op.nn.gelu(gate)), value)), R))

    problem = match([A, R], body).problem
    assert problem.steps == (Step("add", "matrix"),) and problem.gate == "gelu" and problem.n == N


def of_itself(emit):
    gate, _ = chunks(emit, product(emit))
    return emit(op.multiply(emit(op.nn.silu(gate)), gate))


def both_active(emit):
    gate, value = chunks(emit, product(emit))
    return emit(op.multiply(emit(op.nn.silu(gate)), emit(op.nn.silu(value))))


def added(emit):
    gate, value = chunks(emit, product(emit))
    return emit(op.add(emit(op.nn.silu(gate)), value))


def of_something_else(emit):
    gate, _ = chunks(emit, product(emit))
    return emit(op.multiply(emit(op.nn.silu(gate)), R))


def after_an_activation(emit):
    gate, value = chunks(emit, emit(op.nn.relu(product(emit))))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


def of_rows(emit):
    both = emit(op.split(product(emit), 2, axis=1))
    gate, value = (emit(relax.TupleGetItem(both, i)) for i in (0, 1))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


def overlapping(emit):
    """Columns 0 to 15 by columns 8 to 23: of some both are read, of others none."""
    x = product(emit)
    gate, value = (emit(op.strided_slice(x, [2], [begin], [begin + N])) for begin in (0, N // 2))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


def outer(emit):
    """Every column of the gate by every value."""
    gate, value = chunks(emit, product(emit))
    gated = emit(op.reshape(emit(op.nn.silu(gate)), (2, 4, N, 1)))
    return emit(op.multiply(gated, emit(op.reshape(value, (2, 4, 1, N)))))


def of_thirds(emit):
    both = emit(op.split(product(emit), [N // 2, N], axis=-1))
    gate, value = (emit(relax.TupleGetItem(both, i)) for i in (0, 1))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


def of_a_run_time_weight(emit):
    gate, value = chunks(emit, emit(op.matmul(A, W)))
    return emit(op.multiply(emit(op.nn.silu(gate)), value))


W = relax.Var("w", relax.TensorType((K, 2 * N), DTYPE))


@pytest.mark.parametrize(
    "body, why",
    [
        (of_itself, "which multiplies no others"),
        (both_active, "which multiplies no others"),
        (added, "which multiplies no others"),
        (of_something_else, "which multiplies no others"),
        (after_an_activation, "more than a product and its bias"),
        (of_rows, "changes the shape|nn.silu"),
        (overlapping, "which multiplies no others"),
        (outer, "which multiplies no others"),
        (of_thirds, "changes the shape|nn.silu"),
        (of_a_run_time_weight, "are not known"),
    ],
)
def test_what_is_no_gate(body, why):
    with pytest.raises(NoProblem) as error:
        match([A, R, W], body)
    assert re.search(why, str(error.value))


def test_half_of_a_gate_is_no_segment():
    with pytest.raises(NoProblem):
        match([A], lambda emit: emit(op.nn.silu(chunks(emit, product(emit))[0])))
