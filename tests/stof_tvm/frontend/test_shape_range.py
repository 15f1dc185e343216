"""What `dynamic_shapes` and exported programs say of a call's shapes."""

import pytest
import torch
from torch.export import Dim

from stof_tvm.errors import InputError
from stof_tvm.frontend.shape_range import ShapeRange, range_of_module, range_of_program

BATCH, LENGTH, BLOCKS = Dim("batch", min=1, max=8), Dim("length", min=2, max=64), Dim("blocks", min=1, max=5)


class Model(torch.nn.Module):
    def forward(self, ids, pair, *, w=None, flag=True, unused=None):
        raise AssertionError("a range is read without calling the model")


def call(batch: int, length: int, rows: int, last: int = 4) -> tuple[tuple, dict]:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return (ids, (torch.zeros(batch, last), torch.zeros(2 * length))), {"w": torch.zeros(rows, batch), "flag": True}


@pytest.fixture(scope="module")
def shapes():
    pair = ({0: BATCH, 1: Dim.AUTO}, {0: 2 * LENGTH})
    dynamic = {"ids": (BATCH, LENGTH), "pair": pair, "w": {0: 4 * BLOCKS, 1: BATCH}, "flag": None}
    return range_of_module(Model(), *call(1, 8, 8), dynamic)


def test_ranges_and_relations_are_told_by_inputs(shapes):
    first = "ids (1 to 8, 2 to 64), pair_0 (ids[0], at least 1), pair_1 (2*ids[1],)"
    assert shapes.is_dynamic and str(shapes) == f"{first}, w (4*n from 4 to 20, ids[0])"


@pytest.mark.parametrize("sizes", [(1, 2, 4), (8, 64, 20), (3, 7, 12, 9)])
def test_calls_within(shapes, sizes):
    numbers = shapes.numbers(shapes.signature.arguments(*call(*sizes)))
    assert sorted(numbers.values()) == sorted([*sizes[:2], sizes[2] // 4, sizes[3] if len(sizes) > 3 else 4])


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((9, 8, 8), "ids dimension 0 is 9; it must be 1 to 8"),
        ((0, 8, 8), "ids dimension 0 is 0; it must be 1 to 8"),
        ((1, 65, 8), "ids dimension 1 is 65; it must be 2 to 64"),
        ((1, 8, 24), r"w dimension 0 is 24; it must be 4, 8, 12, … or 20 \(4\*n\)$"),
        ((1, 8, 7), r"w dimension 0 is 7; it must be 4, 8, 12, … or 20 \(4\*n\)$"),
    ],
)
def test_sizes_outside(shapes, sizes, message):
    with pytest.raises(InputError, match=message):
        shapes.numbers(shapes.signature.arguments(*call(*sizes)))


class Derived(torch.nn.Module):
    def forward(self, x, y):
        raise AssertionError("a range is read without calling the model")


def derived(x, y, sizes) -> ShapeRange:
    """The range of x (sizes[0],) and y (2, sizes[1])."""
    return range_of_module(Derived(), (torch.zeros(sizes[0]), torch.zeros(2, sizes[1])), {}, {"x": {0: x}, "y": {1: y}})


@pytest.mark.parametrize(
    ("step", "extra", "most", "own", "wrong", "told"),
    [
        (2, 0, 12, 8, 7, "2, 4, 6, … or 24 (2*n)"),
        (2, 0, 12, 8, 26, "2, 4, 6, … or 24 (2*n)"),
        (2, 0, 3, 4, 5, "2, 4 or 6 (2*n)"),
        (2, 0, 2, 4, 3, "2 or 4 (2*n)"),
        (3, 1, 9, 7, 8, "4, 7, 10, … or 28 (3*n + 1)"),
        (1, 5, 4, 7, 10, "6 to 9"),
        (2, 0, None, 8, 7, "2, 4, 6, … (2*n)"),
    ],
)
def test_a_dimension_that_is_an_expression_of_no_other(step, extra, most, own, wrong, told):
    """What fits is listed: nobody gives n itself."""
    n = Dim("n", min=1, **({} if most is None else {"max": most}))
    shapes = derived(None, step * n + extra if extra else step * n, (5, own))
    shapes.numbers([torch.zeros(5), torch.zeros(2, own)])
    with pytest.raises(InputError) as raised:
        shapes.numbers([torch.zeros(5), torch.zeros(2, wrong)])
    assert str(raised.value) == f"y dimension 1 is {wrong}; it must be {told}"


def test_two_dimensions_that_are_expressions_of_one_number():
    n = Dim("n", min=3, max=12)
    shapes = derived(2 * n - 2, 3 * n + 1, (6, 13))
    assert str(shapes) == "x (2*n - 2 from 4 to 22,), y (2, 3*n + 1 from 10 to 37)"
    assert list(shapes.numbers([torch.zeros(8), torch.zeros(2, 16)]).values()) == [5]
    with pytest.raises(InputError) as raised:
        shapes.numbers([torch.zeros(6), torch.zeros(2, 16)])
    assert str(raised.value) == "y dimension 1 is 16; it must be 3*n + 1 = 13, because n is 4 by x[0]"


def test_two_numbers_that_are_no_dimension_have_names_of_their_own():
    n, m = Dim("n", min=1, max=12), Dim("m", min=2, max=9)
    shapes = derived(2 * n, 3 * m, (8, 9))
    assert str(shapes) == "x (2*n from 2 to 24,), y (2, 3*n2 from 6 to 27)"
    with pytest.raises(InputError, match=r"y dimension 1 is 10; it must be 6, 9, 12, … or 27 \(3\*n2\)$"):
        shapes.numbers([torch.zeros(8), torch.zeros(2, 10)])


def test_relations_of_dimensions(shapes):
    values = shapes.signature.arguments(*call(2, 8, 8))
    for number, wrong, message in (
        (1, torch.zeros(3, 4), r"pair_0 dimension 0 is 3; it must be ids\[0\] = 2"),
        (2, torch.zeros(17), r"pair_1 dimension 0 is 17; it must be 2\*ids\[1\] = 16"),
        (2, torch.zeros(16, 1), r"pair_1 must be a float32 tensor of shape \(2\*ids\[1\],\), got .* \(16, 1\)"),
        (3, torch.zeros(8, 2).double(), "w must be a float32 tensor .*, got a float64 tensor"),
        (0, [1], r"ids must be an int64 tensor of shape \(1 to 8, 2 to 64\), got a list"),
    ):
        with pytest.raises(InputError, match=message):
            shapes.numbers([*values[:number], wrong, *values[number + 1 :]])


def test_what_torch_refuses_keeps_its_message():
    nothing = {"ids": None, "pair": (None, None), "w": None, "flag": None}
    for dynamic, message in (
        ({"ids": None}, "top-level keys must be the arg names"),
        ({**nothing, "ids": {1: Dim("n", min=20)}}, "8 not in range"),
        ({**nothing, "ids": (BATCH,)}, "to have the same length as the actual tensor shape"),
        ({**nothing, "pair": None}, "mismatch between the structure"),
        ({**nothing, "ids": {1: LENGTH}, "w": {0: LENGTH}}, r"size\(\)\[0\] = 4 is not equal to .* = 8"),
        (
            {**nothing, "w": {0: 4 * BLOCKS}},
            "specialized it to be a constant(?s:.*)\nTake example inputs",
        ),
    ):
        with pytest.raises(InputError, match=f"dynamic_shapes does not fit the example inputs: (?s:.*){message}"):
            range_of_module(Model(), *call(2, 8, 4), dynamic)
    assert not range_of_module(Model(), *call(2, 8, 4), nothing).is_dynamic


def test_the_guards_of_a_program_are_checked():
    class Blocks(torch.nn.Module):
        def forward(self, x, y):
            return x.reshape(-1, 4, x.shape[1]).sum(1) @ y.T

    dynamic = {"x": {0: Dim.DYNAMIC, 1: Dim.AUTO}, "y": {1: Dim.AUTO}}
    program = torch.export.export(Blocks(), (torch.zeros(8, 5), torch.zeros(3, 5)), dynamic_shapes=dynamic)
    shapes = range_of_program(program)
    assert str(shapes) == "x (at least 2, at least 2), y (3, x[1])"
    assert sorted(shapes.numbers([torch.zeros(12, 7), torch.zeros(3, 7)]).values()) == [7, 12]
    for x, y, message in (
        ((12, 7), (3, 8), r"y dimension 1 is 8; it must be x\[1\] = 7"),
        ((12, 7), (4, 7), "y dimension 0 is 4; it must be 3"),
        ((13, 7), (3, 7), r"not exported for inputs of x \(13, 7\), y \(3, 7\): Guard failed: "),
    ):
        with pytest.raises(InputError, match=message):
            shapes.numbers([torch.zeros(x), torch.zeros(y)])
