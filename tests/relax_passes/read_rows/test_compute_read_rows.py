"""Products are computed for the rows that are read, where nothing reads the others."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.read_rows.compute_read_rows import ComputeReadRows
from tests.relax_passes.read_rows.programs import B, H, S, module, narrowed, product_rows, variable, weight

op = relax.op
X = variable("x", B, S, H)


def last(emit, x, axis=1):
    return emit(op.strided_slice(x, [axis], [int(x.ty.shape[axis]) - 1], [int(x.ty.shape[axis])]))


def linear(emit, x, n=H, seed=0):
    return emit(op.matmul(x, weight(H, n, seed=seed)))


def between(step, select=last):
    """A product, a step, and the last row."""
    return module(lambda emit, x: select(emit, step(emit, linear(emit, x))), X)


def norm(emit, x):
    return emit(op.nn.layer_norm(x, weight(H), weight(H, seed=1), [-1]))


def heads_and_back(emit, x):
    """(B, S, H) to (B, heads, S, size), where each row has a table of its own, and back."""
    heads = emit(op.permute_dims(emit(op.reshape(x, (B, S, 2, 4))), [0, 2, 1, 3]))
    turned = emit(op.multiply(heads, weight(S, 4)))
    return emit(op.reshape(emit(op.permute_dims(turned, [0, 2, 1, 3])), (B, S, H)))


def merged_batch(emit, x):
    flat = linear(emit, emit(op.reshape(x, (B * S, H))))
    return emit(op.reshape(flat, (B, S, H)))


def rotated_halves(emit, x):
    first, second = (emit(op.strided_slice(x, [2], [n], [n + 4])) for n in (0, 4))
    return emit(op.concat([emit(op.negative(second)), first], axis=-1))


def gated(emit, x):
    parts = emit(op.split(linear(emit, x, 2 * H), 2, axis=-1))
    one, other = (emit(relax.TupleGetItem(parts, n)) for n in range(2))
    return emit(op.multiply(emit(op.nn.silu(one)), other))


def batched(emit, x):
    return emit(op.matmul(x, weight(B, H, H)))


def bare_mean(emit, x):
    mean = emit(op.mean(x, axis=[-1]))
    return emit(op.add(x, emit(op.expand_dims(mean, -1))))


STEPS = {
    "a unary operator and a cast": lambda emit, x: emit(
        op.astype(emit(op.astype(emit(op.nn.gelu(x)), "float64")), "float32")
    ),
    "a bias and a table of all rows": lambda emit, x: emit(op.add(emit(op.add(x, weight(H))), weight(S, H))),
    "a table of a row each": lambda emit, x: emit(op.multiply(x, weight(1, S, 1))),
    "a choice": lambda emit, x: emit(op.where(emit(op.greater(x, relax.const(0.0))), x, weight(S, H))),
    "a norm": norm,
    "a softmax": lambda emit, x: emit(op.nn.softmax(x, axis=-1)),
    "a mean of each row": bare_mean,
    "heads and back": heads_and_back,
    "batch and rows merged": merged_batch,
    "halves of each row": rotated_halves,
    "gates": gated,
    "a product for each entry": batched,
    "columns taken": lambda emit, x: linear(
        emit, emit(op.take(x, relax.const(np.arange(H)[::-1].copy(), "int64"), axis=2, mode="clip"))
    ),
    "a dimension more and less": lambda emit, x: emit(op.squeeze(emit(op.nn.relu(emit(op.expand_dims(x, 2)))), [2])),
    "a broadcast": lambda emit, x: emit(op.add(x, emit(op.broadcast_to(weight(S, 1), (B, S, H))))),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_product_before_it_has_the_rows_that_are_read(name):
    mod = between(STEPS[name])
    assert set(product_rows(mod)) == {B * S}
    assert set(product_rows(narrowed(mod))) == {B}


def read_as_well(emit, x, y):
    return emit(op.concat([last(emit, y), emit(op.sum(x, axis=[1], keepdims=True))], axis=1))


def two_selections(emit, x):
    y = linear(emit, x)
    first = emit(op.strided_slice(y, [1], [0], [1]))
    return emit(op.add(first, last(emit, y)))


def also_an_output(emit, x):
    y = linear(emit, x)
    return relax.Tuple([last(emit, y), y])


def scattered(emit, x):
    y = emit(op.scatter_elements(linear(emit, x), relax.const(np.zeros((B, 1, H), "int64")), weight(B, 1, H), axis=1))
    return last(emit, y)


def rows_contracted(emit, x):
    columns = emit(op.matmul(emit(op.permute_dims(linear(emit, x), [0, 2, 1])), weight(S, S)))
    return emit(op.strided_slice(columns, [2], [0], [1]))


def mixed_rows(emit, x):
    return last(emit, emit(op.reshape(linear(emit, x), (B, 4, 12))))


def columns_read(emit, x):
    return last(emit, linear(emit, x), axis=2)


NEAR_MISSES = {
    "two selections of one value": two_selections,
    "the value is a result, too": also_an_output,
    "something reads all rows": lambda emit, x: (lambda y: read_as_well(emit, y, y))(linear(emit, x)),
    "rows are mixed by a reshape": mixed_rows,
    "a softmax over the rows": lambda emit, x: last(emit, emit(op.nn.softmax(linear(emit, x), axis=1))),
    "a sum up to each row": lambda emit, x: last(emit, emit(op.cumsum(linear(emit, x), axis=1))),
    "a scatter": scattered,
    "a product that sums over the rows": rows_contracted,
    "a norm over the rows": lambda emit, x: last(
        emit, emit(op.nn.layer_norm(linear(emit, x), weight(S, H), weight(S, H), [1, 2]))
    ),
    "columns of a product": columns_read,
    "more than half of the rows": lambda emit, x: emit(op.strided_slice(linear(emit, x), [1], [0], [4])),
    "no product": lambda emit, x: last(emit, norm(emit, emit(op.nn.gelu(x)))),
    "rows joined to others": lambda emit, x: last(emit, emit(op.concat([linear(emit, x), weight(B, 2, H)], axis=1))),
    "a slice of rows before": lambda emit, x: last(emit, emit(op.strided_slice(linear(emit, x), [1], [1], [S]))),
    "rows in another order": lambda emit, x: last(emit, emit(op.flip(linear(emit, x), axis=1))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_as_they_are(name):
    mod = module(NEAR_MISSES[name], X)
    tvm.ir.assert_structural_equal(ComputeReadRows()(mod), mod)


def test_a_selection_of_the_whole_value_stops_where_something_else_is_read():
    """The residual sum is read whole by another product, so rows are taken of it and of its norm."""

    def body(emit, x):
        h = emit(op.add(x, linear(emit, x)))
        y = norm(emit, h)
        keys = emit(op.max(linear(emit, y, seed=1), axis=[1], keepdims=True))
        queries = linear(emit, y, seed=2)
        return last(emit, emit(op.add(h, linear(emit, emit(op.multiply(queries, keys)), seed=3))))

    after = narrowed(module(body, X))
    assert sorted(product_rows(after)) == [B, B, B * S, B * S]


def test_a_product_that_sums_over_rows_needs_them_all():
    after = narrowed(module(lambda emit, x: last(emit, emit(op.matmul(weight(S, S), linear(emit, x)))), X))
    assert sorted(product_rows(after)) == [B, B * S]


def test_equal_selections_move_together_and_others_one_after_the_other():
    def body(emit, x):
        y = linear(emit, x)
        one, same = last(emit, emit(op.exp(y))), last(emit, emit(op.tanh(y)))
        other = emit(op.strided_slice(linear(emit, x, seed=1), [1], [0], [2]))
        return emit(op.concat([one, same, other], axis=1))

    assert sorted(product_rows(narrowed(module(body, X)))) == [B, 2 * B]


def test_rows_along_the_first_axis_and_both_operands_of_a_product():
    x, y = variable("x", S, B, H), variable("y", S, H, H)

    def body(emit, x, y):
        return last(emit, emit(op.matmul(x, emit(op.matmul(y, weight(H, H))))), axis=0)

    assert product_rows(narrowed(module(body, x, y))) == [H, B]


def test_a_moved_selection_of_known_rows_looks_like_this():
    x = variable("x", B, S, H)

    def before(emit, x):
        y = emit(op.add(linear(emit, x), weight(S, H)))
        return emit(op.take(y, relax.const(2, "int64"), axis=1, mode="clip"))

    def after(emit, x):
        rows = emit(op.strided_slice(x, [1], [2], [3], [1]))
        table = relax.const(weight(S, H).value.numpy()[2:3], "float32")
        y = emit(op.add(emit(op.matmul(rows, weight(H, H))), table))
        return emit(op.reshape(y, (B, H)))

    tvm.ir.assert_structural_equal(ComputeReadRows()(module(before, x)), module(after, x))


def test_hundreds_of_operators_do_not_recurse():
    def body(emit, x):
        for number in range(400):
            x = emit(op.tanh(linear(emit, x) if number % 100 == 0 else emit(op.negative(x))))
        return last(emit, x)

    mod = module(body, X)
    assert product_rows(ComputeReadRows()(mod)) == [B] * 4


def test_what_is_read_later_is_not_computed_before_it_is_there():
    """Two selections of the same rows, the second one of what follows from the first."""

    def body(emit, x):
        one = last(emit, emit(op.tanh(linear(emit, x))))
        other = last(emit, linear(emit, emit(op.add(x, one)), seed=1))
        return emit(op.concat([one, other], axis=1))

    assert product_rows(narrowed(module(body, X))) == [B, B]
