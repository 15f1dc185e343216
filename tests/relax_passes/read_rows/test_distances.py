"""Integers that are one number plus constants: which number, which constants, and between which bounds."""

import numpy as np
import pytest
from tvm import relax

from relax_passes.ir.bindings import Bindings, operator
from relax_passes.read_rows.distances import UNKNOWN, Anchor, Distances
from tests.relax_passes.read_rows.programs import module, variable

op = relax.op
MANY = -UNKNOWN, UNKNOWN


def const(value, dtype="int64") -> relax.Expr:
    return relax.const(np.array(value), dtype)


def of(body, dtype="int64", shape=(1,)) -> tuple[Anchor, np.ndarray] | None:
    """What is found for the result of `body(emit, n)`, n integers of run time."""
    mod = module(lambda emit, n: emit(op.add(body(emit, n), const(0, "int64"))), variable("n", *shape, dtype=dtype))
    bindings = Bindings(mod["main"])
    (output,) = bindings.outputs
    return Distances(bindings).of(output)


def rising(emit):
    return emit(op.arange(-2, 1, 1, "int64"))


def reshaped(emit, n):
    return emit(op.reshape(emit(op.add(n, const([0, 1, 2, 3]))), (2, 2)))


def broadcast(emit, n):
    return emit(op.add(emit(op.broadcast_to(emit(op.expand_dims(n, 0)), (2, 3))), const([[0, 1, 2]])))


def of_a_subtraction(emit, n):
    return emit(op.add(const([5, 6]), emit(op.subtract(n, const(4)))))


CASES = {  # body, whether it is counted from a number of run time, distances
    "constants": (lambda emit, n: const([3, 4, 9]), False, [3, 4, 9]),
    "constants that are computed": (lambda emit, n: emit(op.multiply(rising(emit), const(3))), False, [-6, -3, 0]),
    "a number": (lambda emit, n: n, True, [0]),
    "a number and constants": (lambda emit, n: emit(op.add(n, rising(emit))), True, [-2, -1, 0]),
    "constants and a number": (lambda emit, n: emit(op.add(rising(emit), n)), True, [-2, -1, 0]),
    "a number less constants": (lambda emit, n: emit(op.subtract(n, const([1, 2]))), True, [-1, -2]),
    "sums in sums": (of_a_subtraction, True, [1, 2]),
    "in another shape": (reshaped, True, [[0, 1], [2, 3]]),
    "broadcast": (broadcast, True, [[0, 1, 2]] * 2),
}


@pytest.mark.parametrize("name", CASES)
def test_distances(name):
    body, is_counted, expected = CASES[name]
    anchor, distances = of(body)
    assert distances.dtype == np.int64 and distances.tolist() == expected
    assert (anchor.expr is not None) == is_counted
    assert (anchor.least, anchor.most) == (MANY if is_counted else (0, 0))


def test_a_wider_integer_is_the_same_number():
    body = lambda emit, n: emit(op.add(emit(op.astype(n, "int64")), const([1, 2])))
    anchor, distances = of(body, "int32")
    assert distances.tolist() == [1, 2] and anchor.expr.ty.dtype == "int32"


def test_what_may_wrap_around_is_another_number():
    """A sum of int32, or of what was cut to 32 bits, is no sum of 64 bits."""

    def cut(emit, n):
        return emit(op.astype(emit(op.add(emit(op.astype(n, "int32")), const(1, "int32"))), "int64"))

    anchor, distances = of(cut)
    assert distances.tolist() == [0] and anchor.expr.ty.dtype == "int32"


@pytest.mark.parametrize(
    "body",
    [
        lambda emit, n: emit(op.add(n, emit(op.multiply(n, const([1, 2]))))),
        lambda emit, n: emit(op.subtract(const([5, 6]), n)),
        lambda emit, n: emit(op.multiply(emit(op.add(n, const([0, 1]))), const(2))),
    ],
)
def test_numbers_that_go_otherwise(body):
    assert of(body) is None


def test_several_numbers_of_run_time_and_floats_are_none():
    assert of(lambda emit, n: n, shape=(2,)) is None
    bindings = Bindings(module(lambda emit, x: emit(op.negative(x)), variable("x", 1))["main"])
    (output,) = bindings.outputs
    assert Distances(bindings).of(output) is None


def test_a_number_may_come_from_anything():
    anchor, distances = of(lambda emit, x: emit(op.astype(x, "int64")), "float32")
    assert distances.tolist() == [0] and (anchor.least, anchor.most) == MANY


def clipped(emit, n, least=6, most=9):
    return emit(op.minimum(emit(op.maximum(n, const([least]))), const([most])))


BOUNDS = {
    "not known": (lambda emit, n: n, MANY),
    "at least": (lambda emit, n: emit(op.maximum(n, const(6))), (6, UNKNOWN)),
    "at most": (lambda emit, n: emit(op.minimum(const(9), n)), (-UNKNOWN, 9)),
    "between": (clipped, (6, 9)),
    "between, in another shape": (lambda emit, n: emit(op.reshape(clipped(emit, n), ())), (6, 9)),
    "the least of two": (lambda emit, n: emit(op.minimum(clipped(emit, n), clipped(emit, n, 2, 12))), (2, 9)),
    "the most of two": (lambda emit, n: emit(op.maximum(clipped(emit, n), clipped(emit, n, 2, 12))), (6, 12)),
    "times": (lambda emit, n: emit(op.multiply(clipped(emit, n), const([4]))), (24, 36)),
    "times something negative": (lambda emit, n: emit(op.multiply(clipped(emit, n), const([-4]))), (-36, -24)),
    "times nothing": (lambda emit, n: emit(op.multiply(n, const([0]))), (0, 0)),
    "times more than 64 bits hold": (lambda emit, n: emit(op.multiply(clipped(emit, n, 0, 1 << 61), const([4]))), MANY),
    "what is only known from below, times": (
        lambda emit, n: emit(op.multiply(emit(op.maximum(n, const([0]))), const([4]))),
        MANY,
    ),
    "times what is not known": (lambda emit, n: emit(op.multiply(clipped(emit, n), n)), MANY),
    "of a remainder": (lambda emit, n: emit(op.floor_mod(n, const([5]))), MANY),
    "crossed": (lambda emit, n: clipped(emit, n, 9, 6), (6, 6)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    body, expected = BOUNDS[name]
    anchor, distances = of(lambda emit, n: emit(op.add(body(emit, n), const([1]))))
    assert distances.reshape(-1).tolist() == [1]
    assert (anchor.least, anchor.most) == expected


def test_bounds_of_32_bits_are_not_looked_at():
    body = lambda emit, n: emit(op.astype(emit(op.maximum(n, const([6], "int32"))), "int64"))
    assert of(body, "int32")[0].least == -UNKNOWN


def test_equal_expressions_are_one_anchor_and_others_are_others():
    def body(emit, n, m):
        bases = clipped(emit, n), clipped(emit, n), clipped(emit, m), clipped(emit, n, 5)
        return emit(op.concat([emit(op.add(base, const([1]))) for base in bases]))

    bindings = Bindings(module(body, *(variable(name, 1, dtype="int64") for name in "nm"))["main"])
    distances = Distances(bindings)
    found = [distances.of(var)[0] for var, value in bindings.values.items() if operator(value) == "add"]
    assert found[0] is found[1] and len({*found}) == 3
    assert distances.anchors[1:] == found[1:] and distances.anchors[0].expr is None
