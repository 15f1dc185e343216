"""Which problem a group is: steps, norms, layouts, dtypes; and why it is none."""

import re

import numpy as np
import pytest
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.matching.segment_problem import NoProblem, match_specific
from relax_passes.fusion.operators import OperatorGraph
from tests.relax_passes.fusion.modules import function_of
from tests.relax_passes.fusion.modules import weight as float_weight
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step

op = relax.op
DTYPE = "float16"
M, N, K = 8, 16, 32


def tensor(name, *shape, dtype=DTYPE):
    return relax.Var(name, relax.TensorType(shape, dtype))


def weight(*shape, dtype=DTYPE):
    return relax.const(float_weight(*shape).value.numpy().astype(dtype))


def match(params, body):
    return match_specific(OperatorGraph(function_of(params, body)))


def reason(params, body) -> str:
    with pytest.raises(NoProblem) as error:
        match(params, body)
    return str(error.value)


A, X, R = tensor("a", 2, 4, K), tensor("x", 2, 4, N), tensor("r", 2, 4, N)


def linear(emit, a, n=N):
    k = int(a.ty.shape[-1])
    return emit(op.add(emit(op.matmul(a, emit(op.permute_dims(weight(n, k))))), weight(n)))


@pytest.mark.parametrize(
    "activation, kind",
    [
        (op.nn.gelu, "gelu"),
        (op.nn.gelu_tanh, "gelu_tanh"),
        (op.nn.relu, "relu"),
        (op.nn.silu, "silu"),
        (op.tanh, "tanh"),
        (op.sigmoid, "sigmoid"),
    ],
)
def test_linear_and_activation(activation, kind):
    found = match([A], lambda emit: emit(activation(linear(emit, A))))
    assert found.problem == GemmProblem(M, N, DTYPE, (Step("add", "row"), Step(kind)), k=K, w_layout="nk")
    assert [tuple(x.ty.shape) for x in found.inputs] == [(2, 4, K), (N, K), (N,)]
    assert len(found.outputs) == 1


def test_a_vocabulary_of_any_size():
    """Its bias is read past the end: a constant, which is padded."""
    found = match([A], lambda emit: linear(emit, A, 13))
    assert found.problem == GemmProblem(M, 13, DTYPE, (Step("add", "row"),), k=K, w_layout="nk")
    assert found.problem.operand_shapes == [(16,)]
    bias = tensor("bias", 13)
    product = lambda emit: emit(op.matmul(A, emit(op.permute_dims(weight(13, K)))))
    assert "a vector of 13 that is not known" in reason([A, bias], lambda emit: emit(op.add(product(emit), bias)))


def test_a_vocabulary_of_any_size_is_for_half_precision():
    a = tensor("a", 2, 4, K, dtype="float32")
    product = lambda emit: emit(op.matmul(a, emit(op.permute_dims(weight(13, K, dtype="float32")))))
    assert "no multiple of 8 are for half precision" in reason([a], product)


def test_a_weight_that_is_not_transposed():
    found = match([A], lambda emit: emit(op.matmul(A, weight(K, N))))
    assert found.problem == GemmProblem(M, N, DTYPE, k=K, w_layout="kn")


HEADS, KEYS = tensor("heads", 2, 3, 5, 8), tensor("keys", 2, 3, 7, 8)  # (B, H, S, D)


@pytest.mark.parametrize("shape, matrices", [((2, 3), 6), ((1, 3), 3), ((3,), 3), ((1, 1), 1), ((), 1)], ids=str)
def test_products_of_a_batch_of_matrices(shape, matrices):
    """q kᵀ without a softmax: as many matrices as parts of the rows, or the same few for each part of the batch."""
    keys = tensor("keys", *shape, 7, 8)
    rank = len(keys.ty.shape)
    found = match(
        [HEADS, keys], lambda emit: emit(op.matmul(HEADS, emit(op.permute_dims(keys, [*range(rank - 2), -1, -2]))))
    )
    batch = 6 if matrices > 1 else 1
    assert found.problem == GemmProblem(30, 7, DTYPE, k=8, w_layout="nk", batch=batch, matrices=matrices)
    assert found.inputs[1].same_as(keys)


def test_weights_times_values_and_a_row_of_biases():
    values = tensor("values", 2, 3, 5, 9)
    probabilities = tensor("p", 2, 3, 5, 5)
    found = match([probabilities, values], lambda e: e(op.add(e(op.matmul(probabilities, values)), weight(9))))
    assert found.problem == GemmProblem(30, 9, DTYPE, (Step("add", "row"),), k=5, w_layout="kn", batch=6, matrices=6)


def test_heads_are_moved_rather_than_transposed():
    """(B, S, H, D) as (B, H, D, S): its rows along D stay whole if they are moved to (B, H, S, D)."""
    keys = tensor("keys", 2, 7, 3, 8)
    found = match([HEADS, keys], lambda e: e(op.matmul(HEADS, e(op.permute_dims(keys, [0, 2, 3, 1])))))
    assert found.problem == GemmProblem(30, 7, DTYPE, k=8, w_layout="nk", batch=6, matrices=6)
    assert [int(axis) for axis in found.inputs[1].attrs.axes] == [0, 2, 1, 3]


@pytest.mark.parametrize("period, batch", [(1, 1), (3, 6), (6, 6)])
def test_a_constant_that_repeats_matrices_is_kept_once(period, batch):
    """Keys of relative positions, repeated for each sample of the batch."""
    keys = np.random.default_rng(0).normal(size=(period, 7, 8)).astype(DTYPE)
    w = relax.const(np.tile(keys, (6 // period, 1, 1)), DTYPE)
    rows = tensor("rows", 6, 5, 8)
    found = match([rows], lambda emit: emit(op.matmul(rows, emit(op.permute_dims(w, [0, 2, 1])))))
    assert found.problem == GemmProblem(30, 7, DTYPE, k=8, w_layout="nk", batch=batch, matrices=period)
    held = found.inputs[1].value if isinstance(found.inputs[1], GenericConst) else w.value
    np.testing.assert_array_equal(held.numpy(), keys)


@pytest.mark.parametrize("left, right", [((1, 3), (2, 3)), ((3,), (2, 3)), ((2, 3), (2, 1)), ((2, 1), (2, 3))], ids=str)
def test_matrices_that_broadcast_are_no_problem(left, right):
    a, w = tensor("a", *left, 5, 8), tensor("w", *right, 8, 7)
    assert "broadcasts matrices" in reason([a, w], lambda emit: emit(op.matmul(a, w)))


def test_a_bias_of_equal_elements_is_a_row():
    """As of a model whose biases are still zero."""
    bias = relax.const(np.zeros(N, DTYPE))
    found = match([A], lambda emit: emit(op.add(emit(op.matmul(A, weight(K, N))), bias)))
    assert found.problem.steps == (Step("add", "row"),) and len(found.inputs) == 3


def test_residual_gate_and_scale():
    gate = tensor("gate", 2, 4, N)

    def body(emit):
        y = emit(op.multiply(gate, linear(emit, A)))
        y = emit(op.divide(emit(op.multiply(y, relax.const(3.0, DTYPE))), relax.const(2.0, DTYPE)))
        return emit(op.add(R, y))

    found = match([A, R, gate], body)
    steps = Step("add", "row"), Step("multiply", "matrix"), Step("scale", value=3.0), Step("scale", value=0.5)
    assert found.problem.steps == (*steps, Step("add", "matrix"))
    assert [x.name for x in found.inputs[3:]] == ["gate", "r"]


def test_clip():
    clipped = lambda low, high: match([A], lambda emit: emit(op.clip(linear(emit, A), low, high)))
    assert clipped(-6.0, 6.0).problem.steps == (Step("add", "row"), Step("clip", value=6.0))
    for low, high in ((0.0, 6.0), (1.0, -1.0)):
        with pytest.raises(NoProblem, match=f"clip between .*{low}.* and .*{high}"):
            clipped(low, high)


def test_reshapes_between_collapse():
    """As GPT-2's Conv1D: the product on (B * S, K), the residual on (B, S, N)."""
    flat = tensor("flat", M, K)

    def body(emit):
        product = emit(op.add(emit(op.matmul(flat, weight(K, N))), weight(N)))
        return emit(op.add(emit(op.reshape(product, (2, 4, N))), R))

    assert match([flat, R], body).problem.steps == (Step("add", "row"), Step("add", "matrix"))


def test_residual_and_layer_norm():
    w, b = weight(N), weight(N)
    found = match([X, R], lambda emit: emit(op.nn.layer_norm(emit(op.add(X, R)), w, b, [-1], 1e-5)))
    assert found.problem == RowProblem(M, N, DTYPE, (Step("add", "matrix"),), Norm("layer_norm", 1e-5))
    assert [x.same_as(y) for x, y in zip(found.inputs, (X, R))] == [True, True]


def test_pre_norm_keeps_the_sum():
    def body(emit):
        total = emit(op.add(X, R))
        return relax.Tuple([emit(op.nn.rms_norm(total, weight(N), [-1], 1e-6)), total])

    found = match([X, R], body)
    assert found.problem.keeps_sum and found.problem.norm == Norm("rms_norm", 1e-6, bias=False)
    assert found.outputs[0].ty.shape[-1] == N and len(found.outputs) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norm_between_casts(dtype):
    """The model normalises in float32; the kernel does so anyway, with the weights it was given."""
    x, r = tensor("x", 2, 4, N, dtype=dtype), tensor("r", 2, 4, N, dtype=dtype)
    w = weight(N, dtype="float32")

    def body(emit):
        wide = emit(op.astype(emit(op.add(x, r)), "float32"))
        return emit(op.astype(emit(op.nn.layer_norm(wide, w, w, [-1], 1e-5)), dtype))

    found = match([x, r], body)
    assert found.problem == RowProblem(M, N, dtype, (Step("add", "matrix"),), Norm("layer_norm", 1e-5))


def test_a_norm_alone_and_product_with_norm():
    found = match([X], lambda emit: emit(op.nn.rms_norm(X, weight(N), [-1], 1e-6)))
    assert found.problem == RowProblem(M, N, DTYPE, (), Norm("rms_norm", 1e-6, bias=False))
    w = weight(N)
    found = match([A, R], lambda emit: emit(op.nn.layer_norm(emit(op.add(R, linear(emit, A))), w, w, [-1], 1e-5)))
    assert isinstance(found.problem, GemmProblem) and found.problem.norm == Norm("layer_norm", 1e-5)


def test_an_adapter_is_two_products():
    """Down, an activation, up, and the adapter's input as residual; as torch.nn.Linear lays weights out."""

    def body(emit):
        inner = emit(op.nn.relu(linear(emit, A)))
        return emit(op.add(linear(emit, emit(op.reshape(inner, (M, N))), K), emit(op.reshape(A, (M, K)))))

    found = match([A], body)
    first = GemmProblem(M, N, DTYPE, (Step("add", "row"), Step("relu")), k=K)
    second = GemmProblem(M, K, DTYPE, (Step("add", "row"), Step("add", "matrix")), k=N)
    assert found.problem == MlpProblem(first, second)
    shapes = [tuple(x.ty.shape) for x in found.inputs]
    assert shapes == [(2, 4, K), (N, K), (N,), (K, N), (K,), (M, K)] and len(found.outputs) == 1


def test_two_products_and_a_norm():
    w = weight(K)
    body = lambda e: e(op.nn.layer_norm(e(op.add(A, linear(e, linear(e, A), K))), w, w, [-1], 1e-5))
    found = match([A], body)
    assert found.problem.first.norm is None and found.problem.second.norm == Norm("layer_norm", 1e-5)
    assert len(found.inputs) == len(found.problem.inputs)


def test_a_view_of_an_operand_is_outside():
    moved = tensor("moved", 4, 2, N)
    found = match([X, moved], lambda emit: emit(op.add(X, emit(op.permute_dims(moved, [1, 0, 2])))))
    assert found.problem == RowProblem(M, N, DTYPE, (Step("add", "matrix"),))


def two_outputs(emit):
    product = linear(emit, A)
    return relax.Tuple([product, emit(op.nn.relu(product))])


def two_products_of_other_rows(emit):
    return linear(emit, emit(op.reshape(linear(emit, A), (4, 4, N // 2))))


def two_products_in_float32(emit):
    """The model's second product reads what no half holds."""
    inner = emit(op.astype(linear(emit, A), "float32"))
    w = emit(op.astype(weight(N, K), "float32"))
    return emit(op.astype(emit(op.matmul(inner, w)), DTYPE))


@pytest.mark.parametrize(
    "params, body, why",
    [
        ([X], lambda e: e(op.nn.softmax(X)), "nn.softmax is none of the templates' operators"),
        ([A], lambda e: linear(e, linear(e, linear(e, A)), K), "matmul is none of|changes the shape"),
        ([A], lambda e: linear(e, e(op.nn.rms_norm(linear(e, A), weight(N), [-1], 1e-6))), "matmul follows the norm"),
        ([A], two_products_of_other_rows, "the second product has rows of 8, the first of 16"),
        ([A], two_products_in_float32, "it mixes float16 and float32"),
        ([A], lambda e: e(op.matmul(X, e(op.reshape(linear(e, A), (N, 8))))), "matmul does not take the chain's value"),
        ([A], two_outputs, "the result of add is read elsewhere, too"),
        ([X], lambda e: e(op.add(X, weight(4, N))), r"add broadcasts \(4, 16\) to \(8, 16\)"),
        ([X], lambda e: e(op.add(X, relax.const(1.0, DTYPE))), r"add broadcasts \(\) to"),
        ([X], lambda e: e(op.subtract(X, weight(N))), "subtract by a tensor"),
        ([X], lambda e: e(op.nn.layer_norm(X, weight(4), weight(4), [1], 1e-5)), r"along the dimensions \[1\]"),
        ([X], lambda e: e(op.nn.relu(e(op.nn.rms_norm(X, weight(N), [-1], 1e-5)))), "nn.relu follows the norm"),
        ([X], lambda e: e(op.add(X, X)), "add does not take the chain's value once"),
        ([X], lambda e: e(op.astype(X, "float32")), "it mixes float16 and float32"),
        ([X], lambda e: e(op.add(e(op.nn.relu(X)), e(op.nn.silu(R)))), "chain's value|beside the chain"),
        ([X], lambda e: e(op.mean(X, [-1])), "no operand of its result's shape"),
    ],
)
def test_what_is_no_problem(params, body, why):
    assert re.search(why, reason([A, X, R], body))


W = tensor("w", N, dtype="float32")


def through(emit, x, *dtypes):
    for dtype in dtypes:
        x = emit(op.astype(x, dtype))
    return x


def rounded_on_the_way(emit):
    """float32 but for one operator: what it rounds is the model's own."""
    x = through(emit, emit(op.add(X32, X32_TOO)), "float16", "float32")
    return emit(op.nn.gelu(x))


def widened_on_the_way(emit):
    return through(emit, emit(op.nn.gelu(through(emit, emit(op.add(X32, X32_TOO)), "float64"))), "float32")


def another_half(emit):
    return through(emit, emit(op.nn.gelu(through(emit, emit(op.add(X, R)), "bfloat16"))), DTYPE)


def integers_on_the_way(emit):
    return emit(op.nn.gelu(through(emit, emit(op.add(X32, X32_TOO)), "int32", "float32")))


X32, X32_TOO = tensor("x32", 2, 4, N, dtype="float32"), tensor("y32", 2, 4, N, dtype="float32")
COLUMN, PLANE = tensor("column", 2, 4, 1), tensor("plane", 4, N)


@pytest.mark.parametrize(
    "body, words",
    [
        (rounded_on_the_way, "astype to float16, in a chain of float32"),
        (widened_on_the_way, "astype to float64, in a chain of float32"),
        (another_half, "astype to bfloat16, in a chain of float16"),
        (integers_on_the_way, "astype to int32, in a chain of float32"),
        (lambda emit: emit(op.divide(linear(emit, A), relax.const(0.0, DTYPE))), "divide by 0"),
        (lambda emit: emit(op.multiply(linear(emit, A), relax.const(np.inf, DTYPE))), "multiply by inf"),
        (lambda emit: emit(op.divide(linear(emit, A), R)), "divide by a tensor"),
        (lambda emit: emit(op.add(linear(emit, A), COLUMN)), "broadcasts"),
        (lambda emit: emit(op.multiply(linear(emit, A), PLANE)), "broadcasts"),
        (lambda emit: emit(op.nn.layer_norm(X, weight(4, N), weight(4, N), [-2, -1], 1e-5)), "along the dimensions"),
        (lambda emit: emit(op.nn.rms_norm(X, weight(N), [-1], -1e-3)), "eps"),
        (
            lambda emit: through(emit, emit(op.nn.layer_norm(through(emit, X, "float32"), W, W, [-1], 1e-5)), DTYPE),
            "weights",
        ),
    ],
)
def test_near_misses_say_why(body, words):
    assert words in reason([A, X, R, COLUMN, PLANE, X32, X32_TOO, W], body)


def test_a_weight_that_half_precision_cannot_hold_keeps_its_norm():
    wide = relax.const(np.full(N, 1e6, "float32"))
    body = lambda emit: through(emit, emit(op.nn.rms_norm(through(emit, X, "float32"), wide, [-1], 1e-5)), DTYPE)
    assert "weights are float32" in reason([X], body)
