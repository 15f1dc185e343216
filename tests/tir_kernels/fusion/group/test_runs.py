"""Which aligned runs hold what the lanes of a vector read: against the lanes' positions, counted out."""

import itertools

import pytest
import tvm
from tvm import tirx

from tir_kernels.fusion.group.runs import MOST_ELEMENTS, WIDTHS, Runs, runs_of
from tir_kernels.fusion.group.symbols import Symbols, substitute
from tir_kernels.fusion.steps import VECTOR

ROWS, VECTORS = 3, 5


def number(expression, variables, values) -> int:
    """An expression of variables at their values."""
    constants = {var: tirx.IntImm("int32", value) for var, value in zip(variables, values, strict=True)}
    return int(tvm.sym.Analyzer().simplify(substitute(expression, constants)))


def assert_right(runs: Runs, position, variables, elements: int) -> None:
    """Every lane finds its position, in runs that are aligned and end inside of the source, wherever the vector is."""
    assert runs.width in WIDTHS and runs.width * len(runs.firsts) <= MOST_ELEMENTS
    for place in itertools.product(range(ROWS), range(VECTORS)):
        firsts = [number(first, variables, (*place, 0)) for first in runs.firsts]
        assert all(first % runs.width == 0 and 0 <= first <= elements - runs.width for first in firsts)
        for lane, (run, i) in enumerate(runs.places):
            assert firsts[run] + i == number(position, variables, (*place, lane))


def runs_for(form, elements: int) -> tuple[int, int] | None:
    """(width, number) of the runs of a map of (row, vector, lane), which are right; None without runs."""
    symbols = Symbols()
    variables = symbols.new("row", ROWS), symbols.new("vector", VECTORS), symbols.lane
    position = symbols.analyzer.simplify(form(*variables))
    found = runs_of(symbols, position, elements)
    if found is None:
        return None
    assert_right(found, position, variables, elements)
    return found.width, len(found.firsts)


def half(lane):
    return tirx.floordiv(lane, 2)


def swapped(lane):
    return lane + 1 - tirx.floormod(lane, 2) * 2


MAPS = {
    "neighbours": (lambda row, vector, lane: row * 40 + vector * 8 + lane, 120, (8, 1)),
    "partners": (lambda row, vector, lane: row * 40 + vector * 8 + swapped(lane), 120, (8, 1)),
    "backwards": (lambda row, vector, lane: row * 40 + 39 - vector * 8 - lane, 120, (8, 1)),
    "even of pairs": (lambda row, vector, lane: row * 40 + vector * 8 + half(lane) * 2, 120, (8, 1)),
    "odd of pairs": (lambda row, vector, lane: row * 40 + vector * 8 + half(lane) * 2 + 1, 120, (8, 1)),
    "one for each pair": (lambda row, vector, lane: row * 20 + vector * 4 + half(lane), 60, (4, 1)),
    "one for each four": (lambda row, vector, lane: row * 10 + vector * 2 + tirx.floordiv(lane, 4), 30, (2, 1)),
    "every second": (lambda row, vector, lane: (row * 40 + vector * 8 + lane) * 2 + 1, 240, (8, 2)),
    "from the middle of a vector": (lambda row, vector, lane: row * 44 + vector * 8 + lane + 4, 136, (4, 2)),
    "from a vector's last": (lambda row, vector, lane: row * 48 + vector * 8 + lane + 7, 144, (8, 2)),
    "at multiples of two": (lambda row, vector, lane: row * 42 + vector * 8 + lane, 126, (2, 4)),
}


@pytest.mark.parametrize("name", MAPS)
def test_runs_hold_what_lanes_read(name):
    form, elements, wanted = MAPS[name]
    assert runs_for(form, elements) == wanted


@pytest.mark.parametrize(
    "form",
    [
        lambda row, vector, lane: (row * 40 + vector * 8 + lane) * 3,
        lambda row, vector, lane: (row * 40 + vector * 8 + lane) * 4,
        lambda row, vector, lane: lane * 40 + vector * 8 + row,
        lambda row, vector, lane: row * 41 + vector * 8 + swapped(lane),
        lambda row, vector, lane: tirx.Min(row * 40 + vector * 8 + lane, tirx.IntImm("int32", 118)),
        lambda row, vector, lane: row * 40 + vector * 8 + tirx.floordiv(lane, VECTOR),
    ],
    ids=["every third", "every fourth", "a column", "rows of an odd length", "up to an end", "one element"],
)
def test_elements_of_many_runs_or_of_unknown_places_have_none(form):
    assert runs_for(form, 480) is None


def test_runs_end_where_the_source_does():
    """Eight neighbours from the second on, in two vectors, in runs of half a vector, or of pairs; or alone."""
    form = lambda row, vector, lane: row * 40 + vector * 8 + lane + 1
    assert runs_for(form, 128) == (8, 2)
    assert runs_for(form, 124) == (4, 3)
    assert runs_for(form, 122) == (2, 5)
    assert runs_for(form, 121) is None
