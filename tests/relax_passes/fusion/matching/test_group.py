"""Elementwise groups: which problem a segment is, that it computes the same, what is none, when others are chosen."""

import numpy as np
import pytest
from tvm import relax

from relax_passes.fusion.matching.group import match_group
from relax_passes.fusion.matching.segment_problem import NoProblem, match_problem
from relax_passes.fusion.operators import OperatorGraph
from tests.relax_passes.fusion.matched_values import assert_match_computes
from tests.relax_passes.fusion.modules import function_of, norm, weight
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.problem import RowProblem, Step

op = relax.op
BATCH, LENGTH, HEADS, SIZE, N = 2, 3, 2, 8, 16


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def check(params, body, atol=1e-5) -> GroupProblem:
    """The problem of a group whose reference computes what the function does."""
    rng = np.random.default_rng(3)
    values = []
    for param in params:
        shape, dtype = [int(n) for n in param.ty.shape], str(param.ty.dtype)
        numbers = rng.standard_normal(shape) if "float" in dtype else rng.integers(0, 2, shape)
        values.append(numbers.astype(dtype))
    problem = assert_match_computes(function_of(params, body), values, atol).problem
    assert isinstance(problem, GroupProblem)
    return problem


def names(problem) -> list[str]:
    return [value.operator for value in problem.values]


# -- rotary ------------------------------------------------------------------------------------------------------------

PACKED = tensor("packed", BATCH, LENGTH, HEADS * SIZE)
COS, SIN = tensor("cos", LENGTH, SIZE), tensor("sin", LENGTH, SIZE)


def heads(emit):
    return emit(op.permute_dims(emit(op.reshape(PACKED, (BATCH, LENGTH, HEADS, SIZE))), [0, 2, 1, 3]))


def halves_by_slices(emit, x):
    return [emit(op.strided_slice(x, [3], [first], [last])) for first, last in ((0, SIZE // 2), (SIZE // 2, 2**63 - 1))]


def halves_by_split(emit, x):
    parts = emit(op.split(x, 2, -1))
    return [emit(relax.TupleGetItem(parts, i)) for i in range(2)]


@pytest.mark.parametrize("halves", [halves_by_slices, halves_by_split])
def test_rotation_of_halves(halves):
    def body(emit):
        x = heads(emit)
        low, high = halves(emit, x)
        turned = emit(op.concat([emit(op.negative(high)), low], -1))
        return emit(op.add(emit(op.multiply(x, COS)), emit(op.multiply(turned, SIN))))

    problem = check([PACKED, COS, SIN], body)
    assert sorted(names(problem)) == sorted(
        ["reshape", "permute", "slice", "slice", "negative", "concat", "multiply", "multiply", "add"]
    )
    assert [source.shape for source in problem.sources] == [
        (BATCH, LENGTH, HEADS * SIZE),
        (LENGTH, SIZE),
        (LENGTH, SIZE),
    ]


def test_rotation_of_neighbours():
    half = (BATCH, HEADS, LENGTH, SIZE // 2, 1)

    def body(emit):
        x = heads(emit)
        even, odd = (emit(op.strided_slice(x, [3], [first], [SIZE], [2])) for first in (0, 1))
        cos, sin = (emit(op.strided_slice(table, [1], [0], [SIZE // 2])) for table in (COS, SIN))
        products = lambda a, b: (emit(op.multiply(a, cos)), emit(op.multiply(b, sin)))
        low, high = emit(op.subtract(*products(even, odd))), emit(op.add(*products(odd, even)))
        pairs = emit(op.concat([emit(op.reshape(x, half)) for x in (low, high)], -1))
        return emit(op.reshape(pairs, (BATCH, HEADS, LENGTH, SIZE)))

    assert names(check([PACKED, COS, SIN], body)).count("slice") == 4


# -- other groups ------------------------------------------------------------------------------------------------------

X, R, WIDE = tensor("x", 2, 4, N), tensor("r", 2, 4, N), tensor("wide", 2, 4, 2 * N)
COLUMN, KEEP = tensor("column", 2, 1, N), tensor("keep", 4, 1, dtype="bool")


@pytest.mark.parametrize("activation", [op.nn.gelu, op.nn.silu, op.sigmoid, op.nn.gelu_tanh])
def test_gated_halves(activation):
    def body(emit):
        parts = emit(op.split(WIDE, 2, -1))
        gate, value = (emit(relax.TupleGetItem(parts, i)) for i in range(2))
        return emit(op.multiply(emit(activation(gate)), value))

    problem = check([WIDE], body, 1e-4)
    name = activation.__name__
    assert names(problem) == ["slice", name, "slice", "multiply"] and len(problem.sources) == 1


def test_a_modulated_norm_and_the_sum_that_it_reads():
    table = tensor("table", 2, 6 * N)

    def body(emit):
        total = emit(op.add(X, R))
        parts = emit(op.split(table, 6, -1))
        shift, scale = (emit(op.expand_dims(emit(relax.TupleGetItem(parts, i)), 1)) for i in (0, 1))
        more = emit(op.add(scale, relax.const(1.0, "float32")))
        return relax.Tuple([emit(op.add(emit(op.multiply(norm(emit, total), more)), shift)), total])

    problem = check([X, R, table], body, 1e-4)
    assert len(problem.results) == 2 and names(problem).count("layer_norm") == 1
    assert ("constant", (1.0,), ()) in [(v.operator, v.numbers, v.shape) for v in problem.values]


def test_a_class_token_before_patches():
    token, positions = weight(1, 1, N), weight(1, 5, N)

    def body(emit):
        joined = emit(op.concat([emit(op.broadcast_to(token, (2, 1, N))), X], 1))
        return emit(op.add(joined, positions))

    assert {"concat", "add"} <= set(names(check([X], body)))


def test_where_and_comparisons():
    def body(emit):
        small = emit(op.logical_and(emit(op.less(X, relax.const(0.5, "float32"))), KEEP))
        other = emit(op.maximum(R, relax.const(0.0, "float32")))
        return emit(op.where(emit(op.logical_not(small)), X, other))

    problem = check([X, R, KEEP], body)
    assert [v.numbers[0] for v in problem.values if v.operator == "constant"] == [0.5, 0.0]
    assert problem.value(problem.results[0]).operator == "where"


def test_casts_clip_and_integers():
    index = tensor("index", 2, 4, N, dtype="int64")

    def body(emit):
        wide = emit(op.astype(emit(op.add(index, relax.const(3, "int64"))), "float32"))
        return emit(op.clip(emit(op.multiply(wide, X)), -2.0, 2.5))

    problem = check([X, index], body)
    assert problem.value(problem.results[0]).numbers == (-2.0, 2.5)
    assert [v.numbers for v in problem.values if v.operator == "constant"] == [(3,)]


def test_a_result_that_is_a_view():
    body = lambda emit: emit(op.permute_dims(emit(op.add(X, COLUMN)), [2, 0, 1]))
    problem = check([X, COLUMN], body)
    assert problem.outputs == [((N, 2, 4), "float32")] and names(problem)[-1] == "permute"


def test_one_number_taken_of_an_axis():
    body = lambda emit: emit(op.nn.relu(emit(op.take(X, relax.const(2, "int64"), axis=1))))
    assert {"slice", "reshape"} <= set(names(check([X], body))) or "take" in names(check([X], body))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scattered_places_are_read_as_an_operand(axis):
    """Tokens in the order of a mask's tiles: the reader reads them where they lie."""
    tokens = tensor("tokens", 12, 12, 12)
    places = relax.const(np.random.default_rng(5).permutation(12)[:11].astype("int64"))
    problem = check([tokens], lambda emit: emit(op.nn.relu(emit(op.take(tokens, places, axis=axis, mode="clip")))))
    assert names(problem) == ["rows", "relu"] and [x.shape for x in problem.sources] == [(12, 12, 12), (11,)]


def test_scattered_places_of_two_dimensions():
    tokens = tensor("tokens", 12, 6)
    places = relax.const(np.array([[7, 0, 3], [3, 9, 1]], "int32"))
    problem = check([tokens], lambda emit: emit(op.nn.relu(emit(op.take(tokens, places, axis=0, mode="clip")))))
    assert names(problem) == ["rows", "relu"] and problem.outputs == [((2, 3, 6), "float32")]


def test_scattered_places_in_other_integers_are_none():
    places = relax.const(np.array([7, 0, 3, 9, 1, 4, 11], "int16"))
    function = function_of([X], lambda emit: emit(op.nn.relu(emit(op.take(X, places, axis=2, mode="clip")))))
    with pytest.raises(NoProblem, match="scattered places in int16"):
        match_group(OperatorGraph(function))


def test_expressions_of_constants_are_operands():
    def body(emit):
        table = emit(op.multiply(weight(N), relax.const(2.0, "float32")))
        return emit(op.permute_dims(emit(op.multiply(X, table)), [1, 0, 2]))

    problem = check([X], body)
    assert [source.shape for source in problem.sources] == [(2, 4, N), (N,)]


# -- what is none ------------------------------------------------------------------------------------------------------


def test_sinusoids_of_a_time():
    time, table = tensor("time", 4), weight(1, 8)

    def body(emit):
        angles = emit(op.multiply(emit(op.expand_dims(time, 1)), table))
        both = emit(op.concat([emit(op.sin(angles)), emit(op.cos(angles))], -1))
        halves = [emit(op.strided_slice(both, [1], [first], [first + 8])) for first in (8, 0)]
        return emit(op.astype(emit(op.concat(halves, -1)), "float16"))

    assert {"sin", "cos", "concat", "cast"} <= set(names(check([time], body, 2e-3)))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", [None, [-1], [0], [1], [-1, 0]])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_reductions(name, axes, keepdims):
    """With what stands before and after them."""

    def body(emit):
        reduced = emit(getattr(op, name)(emit(op.multiply(X, R)), axes, keepdims))
        return emit(op.multiply(reduced, relax.const(0.5)))

    (reduction,) = [value for value in check([X, R], body).values if value.operator == name]
    assert (
        reduction.numbers
        == {None: (0, 1, 2), (-1,): (2,), (0,): (0,), (1,): (1,), (-1, 0): (0, 2)}[
            None if axes is None else tuple(axes)
        ]
    )


def test_sums_of_halves_are_of_float32():
    """As models spell them; a cast of what was summed to integers is refused, one of what was found is not."""
    half = tensor("half", 2, 4, N, dtype="float16")

    def total(emit):
        return emit(op.sum(emit(op.astype(half, "float32")), [1]))

    problem = check([half], lambda emit: emit(op.astype(total(emit), "float16")), 1e-2)
    assert names(problem) == ["cast", "sum", "cast"] and problem.dtype == "float16"
    with pytest.raises(NoProblem, match="cast to int32 of floats that are computed"):
        match_group(OperatorGraph(function_of([half], lambda emit: emit(op.astype(total(emit), "int32")))))
    found = match_group(
        OperatorGraph(function_of([half], lambda e: e(op.astype(e(op.max(half, [1])), "int32"))))
    ).problem
    assert names(found) == ["max", "cast"]


def test_what_is_rounded_before_a_sum_stays_rounded():
    """A cast to half precision on the way to a sum in float32."""
    body = lambda e: e(op.sum(e(op.astype(e(op.astype(X, "float16")), "float32")), [1]))
    with pytest.raises(NoProblem, match="a cast to float16 on the way to float32"):
        match_group(OperatorGraph(function_of([X], body)))


def test_infinities_are_told_of_operands_only():
    """Half precision overflows where float32 does not."""
    half = tensor("half", 2, 4, N, dtype="float16")
    any_infinite = lambda e, x: e(op.max(e(op.astype(e(op.isinf(x)), "int32")), [0, 1, 2]))
    assert names(check([half], lambda e: any_infinite(e, half))) == ["isinf", "cast", "max"]
    with pytest.raises(NoProblem, match="isinf to bool of floats that are computed"):
        match_group(OperatorGraph(function_of([half], lambda e: any_infinite(e, e(op.multiply(half, half))))))


def half_norm(emit):
    return emit(op.nn.layer_norm(X, weight(4, N), weight(4, N), [-2, -1], 1e-5))


@pytest.mark.parametrize(
    "body, why",
    [
        (lambda e: e(op.argmax(X, 1)), "argmax is no operator of elementwise groups"),
        (lambda e: e(op.variance(X, [1])), "variance is no operator of elementwise groups"),
        (lambda e: e(op.cumsum(X, 1)), "cumsum is no operator of elementwise groups"),
        (lambda e: e(op.nn.softmax(X)), "nn.softmax is no operator of elementwise groups"),
        (
            lambda e: e(op.nn.group_norm(X, weight(N), weight(N), 2, 2, [1])),
            "nn.group_norm is no operator of elementwise groups",
        ),
        (half_norm, "layer_norm along the dimensions [-2, -1]"),
        (lambda e: e(op.nn.rms_norm(X, weight(N), [-1], -1e-3)), "rms_norm with eps=-0.001"),
        (lambda e: e(op.nn.relu(e(op.strided_slice(X, [2], [N - 1], [-N - 1], [-1])))), "runs backwards"),
        (lambda e: e(op.matmul(X, e(op.nn.relu(weight(N, 8))))), "matmul is no operator of elementwise groups"),
        (lambda e: e(op.nn.relu(e(op.matmul(X, weight(N, 8))))), "matmul is no operator of elementwise groups"),
        (lambda e: e(op.clip(X, 0.0, float("inf"))), "clip by bounds that are no finite numbers"),
    ],
)
def test_what_is_no_group_says_why(body, why):
    with pytest.raises(NoProblem) as error:
        match_group(OperatorGraph(function_of([X], body)))
    assert why in str(error.value)


def test_both_reasons_are_told():
    with pytest.raises(NoProblem) as error:
        match_problem(function_of([X], lambda emit: emit(op.cumsum(X, 1))))
    assert "cumsum is none of the templates' operators; cumsum is no operator of elementwise groups" in str(error.value)


def test_a_product_is_never_in_a_group():
    with pytest.raises(NoProblem) as error:
        match_problem(function_of([X], lambda emit: emit(op.exp(emit(op.matmul(X, weight(N, 8)))))))
    assert "elementwise groups" not in str(error.value)


# -- which kernel ------------------------------------------------------------------------------------------------------


def test_kernels_of_their_own_come_first_where_no_data_moves():
    chain = match_problem(function_of([X, R], lambda emit: emit(op.nn.relu(emit(op.add(X, R)))))).problem
    assert chain == RowProblem(8, N, "float32", (Step("add", "matrix"), Step("relu")))
    normed = match_problem(function_of([X, R], lambda emit: norm(emit, emit(op.add(X, R))))).problem
    assert isinstance(normed, RowProblem) and normed.norm is not None
    viewed = lambda emit: emit(op.add(emit(op.reshape(X, (8, N))), emit(op.reshape(R, (8, N)))))
    assert isinstance(match_problem(function_of([X, R], viewed)).problem, RowProblem)


def test_a_group_reads_the_halves_of_one_product_in_place():
    def body(emit):
        parts = emit(op.split(WIDE, 2, -1))
        return emit(op.multiply(*(emit(relax.TupleGetItem(parts, i)) for i in range(2))))

    match = match_problem(function_of([WIDE], body))
    assert isinstance(match.problem, GroupProblem) and [x.name for x in match.inputs] == ["wide"]


def test_a_group_writes_a_result_that_moves():
    body = lambda emit: emit(op.permute_dims(emit(op.add(X, R)), [0, 2, 1]))
    match = match_problem(function_of([X, R], body))
    assert isinstance(match.problem, GroupProblem) and match.problem.outputs == [((2, N, 4), "float32")]


# -- what is not rounded in between ------------------------------------------------------------------------------------


def rounded(to: str, back: str):
    """exp(x) rounded to one dtype, and read on in another."""
    return lambda emit: emit(op.add(emit(op.astype(emit(op.astype(emit(op.exp(FLOATS)), to)), back)), OTHER))


FLOATS, OTHER = (relax.Var(name, relax.TensorType((3, 16), "float32")) for name in "xr")
NARROW = relax.Var("h", relax.TensorType((3, 16), "float16"))


def group_of(params, body):
    return match_group(OperatorGraph(function_of(params, body)))


def test_a_model_that_rounds_means_it():
    with pytest.raises(NoProblem, match="a cast to float16 on the way to float32"):
        group_of([FLOATS, OTHER], rounded("float16", "float32"))
    with pytest.raises(NoProblem, match="a cast to bfloat16 on the way to float16"):
        group_of(
            [NARROW], lambda emit: emit(op.astype(emit(op.negative(emit(op.astype(NARROW, "bfloat16")))), "float16"))
        )


def test_roundings_to_the_result_s_dtype_vanish():
    def body(emit):
        wide = emit(op.multiply(emit(op.astype(NARROW, "float32")), FLOATS))
        return emit(op.multiply(emit(op.astype(wide, "float16")), NARROW))

    assert len(group_of([NARROW, FLOATS], body).problem.results) == 1
    two = lambda emit: relax.Tuple([wide := emit(op.negative(FLOATS)), emit(op.astype(wide, "float16"))])
    assert len(group_of([FLOATS], two).problem.results) == 2


@pytest.mark.parametrize("compare", [op.equal, op.less, op.greater_equal])
def test_comparisons_take_exact_floats(compare):
    zero = relax.const(0.0, "float32")
    kept = lambda emit: emit(compare(emit(op.maximum(emit(op.negative(FLOATS)), OTHER)), zero))
    assert group_of([FLOATS, OTHER], kept).problem.dtype == "bool"
    with pytest.raises(NoProblem, match="of floats that are computed in the segment"):
        group_of([FLOATS, OTHER], lambda emit: emit(compare(emit(op.divide(FLOATS, OTHER)), zero)))


def test_integers_are_taken_of_exact_floats():
    assert group_of([FLOATS], lambda emit: emit(op.astype(emit(op.nn.relu(FLOATS)), "int64"))).problem.dtype == "int64"
    with pytest.raises(NoProblem, match="of floats that are computed in the segment"):
        group_of([FLOATS, OTHER], lambda emit: emit(op.astype(emit(op.divide(FLOATS, OTHER)), "int64")))


def test_an_integer_that_no_float_holds_is_an_operand():
    n = relax.Var("n", relax.TensorType((3, 16), "int64"))
    most = relax.const((1 << 63) - 1, "int64")
    found = group_of([n], lambda emit: emit(op.maximum(n, most)))
    assert [value.operator for value in found.problem.values] == ["maximum"] and len(found.inputs) == 2


def test_elements_of_a_number_are_gathered():
    index = relax.Var("i", relax.TensorType((3, 4), "int64"))
    one = relax.const(np.ones((3, 16), "float32"))
    body = lambda emit: emit(
        op.add(emit(op.gather_elements(one, index, 1)), emit(op.strided_slice(FLOATS, [1], [0], [4])))
    )
    found = group_of([index, FLOATS], body)
    assert [value.operator for value in found.problem.values][:2] == ["constant", "broadcast"]
