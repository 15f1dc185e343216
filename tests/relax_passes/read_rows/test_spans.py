"""Reads of runs of rows are found, with the number that they are counted from; others are not."""

import numpy as np
import pytest
from tvm import relax

from relax_passes.ir.bindings import Bindings
from relax_passes.read_rows.places import Digit, Place
from relax_passes.read_rows.spans import RunFinder, Span
from tests.relax_passes.read_rows.programs import B, H, S, module, variable

op = relax.op


def const(value, dtype="int64") -> relax.Expr:
    return relax.const(np.array(value), dtype)


def runs(read, *more) -> RunFinder:
    """The runs of what `read(emit, x, *more)` reads of a value x (B, S, H)."""

    def body(emit, x, *more):
        return read(emit, emit(op.tanh(x)), *more)

    return RunFinder(Bindings(module(body, variable("x", B, S, H), *more)["main"]))


def the_run(read, *more):
    found = runs(read, *more).found
    (run,) = found.values() if found else (None,)
    return run


def sliced(axis, first, end, step=1):
    return lambda emit, x: emit(op.strided_slice(x, [axis], [first], [end], [step]))


def took(rows, axis=1, dtype="int64"):
    return lambda emit, x: emit(op.take(x, const(rows, dtype), axis=axis))


RUNS = {
    "a slice": (sliced(1, 2, 4), 1, Span(2, 4)),
    "a slice of another axis": (sliced(2, 3, 8), 2, Span(3, 8)),
    "a slice from the end": (sliced(1, -2, S), 1, Span(S - 2, S)),
    "constants": (took([2, 3, 4]), 1, Span(2, 5)),
    "one constant": (took([3]), 1, Span(3, 4)),
    "a constant without an axis": (took(3), 1, Span(3, 4)),
    "constants of 32 bits, of another axis": (took([5, 6, 7], 2, "int32"), 2, Span(5, 8)),
    "constants of an axis from the end": (took([5, 6], -1), 2, Span(5, 7)),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name):
    read, axis, span = RUNS[name]
    run = the_run(read)
    assert run.span == span and run.span.count == span.stop - span.start
    assert run.place == Place(Digit(axis, (B, S, H)[axis])) and run.anchor.expr is None


def two_axes(emit, x):
    return emit(op.strided_slice(x, [1, 2], [1, 1], [3, 3]))


def flat(emit, x):
    return emit(op.take(emit(op.reshape(x, (B * S * H,))), const([3, 4])))


def of_itself(emit, x):
    index = emit(op.astype(emit(op.reshape(x, (B * S * H,))), "int64"))
    return emit(op.take(index, index, axis=0))


@pytest.mark.parametrize(
    "read",
    [
        sliced(1, 0, S, 2),
        sliced(1, 3, 1),
        sliced(1, 4, 1, -1),
        two_axes,
        took([2, 4]),
        took([3, 2]),
        took([2, 2]),
        took([[2, 3], [4, 5]]),
        took([-1]),
        took([-2, -1]),
        took([S - 1, S]),
        flat,
        of_itself,
    ],
)
def test_what_is_no_run(read):
    assert the_run(read) is None


def counted(least, most, distances):
    """Rows at these distances from a number of `least` to `most`."""

    def read(emit, x, n):
        bounded = emit(op.minimum(emit(op.maximum(n, const([least]))), const([most])))
        return emit(op.take(x, emit(op.add(bounded, const(distances))), axis=1))

    return read


NUMBER = variable("n", 1, dtype="int64")


def test_rows_counted_from_a_number():
    run = the_run(counted(2, S - 1, [-2, -1, 0]), NUMBER)
    assert run.span == Span(-2, 1)
    assert (run.anchor.least, run.anchor.most) == (2, S - 1)


@pytest.mark.parametrize(
    ("least", "most", "distances"),
    [(1, S - 1, [-2, -1, 0]), (2, S, [-2, -1, 0]), (2, S - 2, [0, 2]), (2, S - 2, [1, 0]), (-1, S - 1, [0])],
)
def test_rows_that_may_lie_outside_and_others_than_runs(least, most, distances):
    assert the_run(counted(least, most, distances), NUMBER) is None


def test_a_number_that_may_be_anything():
    assert the_run(lambda emit, x, n: emit(op.take(x, n, axis=1)), NUMBER) is None


def test_two_numbers():
    """Each has its own anchor; reads that are counted from one of them have the same."""

    def read(emit, x, n, m):
        parts = [counted(2, 4, distances)(emit, x, base) for base in (n, m) for distances in ([0], [-1])]
        return emit(op.concat([*parts, sliced(1, 0, 1)(emit, x)], axis=1))

    found = runs(read, NUMBER, variable("m", 1, dtype="int64"))
    anchors = [run.anchor for run in found.found.values()]
    assert len(anchors) == 5 and anchors[0] is anchors[1] and anchors[2] is anchors[3]
    assert len({*anchors}) == 3 and found.anchors == [anchors[0], anchors[2], anchors[4]]
    assert anchors[4].expr is None


def test_joined_runs_hold_both():
    assert Span(-3, 1).joined(Span(0, 4)) == Span(-3, 4)
    assert Span(5, 6).joined(Span(0, 2)) == Span(0, 6)
