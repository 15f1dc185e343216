"""What `dynamic_shapes` and exported programs say of a call's shapes."""

import pytest
import torch
from torch.export import Dim

from stof_tvm.errors import InputError
from stof_tvm.frontend.shape_range import range_of_module, range_of_program

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
    assert shapes.is_dynamic and str(shapes) == f"{first}, w (4*n, 4 to 20, ids[0])"


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
        ((1, 8, 24), "w dimension 0 is 24; it must be 4 to 20"),
        ((1, 8, 7), r"w dimension 0 is 7; it must be 4\*n, 4 to 20"),
    ],
)
def test_sizes_outside(shapes, sizes, message):
    with pytest.raises(InputError, match=message):
        shapes.numbers(shapes.signature.arguments(*call(*sizes)))


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
