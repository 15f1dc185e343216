"""Programs of a range: sizes of 1 have their own, and all together compute what the model does at every shape."""

import itertools

import pytest
import torch
from torch import nn
from torch.export import Dim

from stof_tvm.buckets.exports import export_of_program, exports_of_module
from stof_tvm.errors import ExportError, InputError
from stof_tvm.frontend.shape_range import range_of_module, range_of_program
from tests.stof_tvm.frontend.padding.poison import assert_same, run_poisoned


class Pair(nn.Module):
    def forward(self, x, y):
        return {"products": x @ y.mT, "others": (x.mean(1), None, y.shape[1])}


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y


class Squeezed(nn.Module):
    """It is another model for one row."""

    def forward(self, x, y):
        return (x.squeeze(0) if x.shape[0] == 1 else x * 2) + y.sum()


def exports_of(model, inputs, dynamic_shapes):
    shapes = range_of_module(model, inputs, {}, dynamic_shapes)
    limits = {symbol: shapes.limits.get(symbol, (1, 8)) for symbol in shapes.symbols}
    return shapes, exports_of_module(model, shapes, limits, list(inputs), dynamic_shapes)


def padded_result(shapes, exports, values, largest):
    """What the program for some inputs computes with poison for padding, up to the largest number of each symbol."""
    numbers = shapes.numbers(values)
    export = exports[frozenset(x for ones in exports for x in ones if numbers[x] == 1)]
    export.numbers(values)
    return run_poisoned(export.program, export.shapes, values, [largest] * len(export.shapes.symbols))


@torch.no_grad()
def test_two_sizes_of_which_each_may_be_1():
    inputs = torch.randn(2, 1, 4), torch.randn(2, 3, 4)  # the example may be one of these
    dims = {"x": {1: Dim("n", min=1, max=6)}, "y": {1: Dim("k", min=1, max=6)}}
    shapes, exports = exports_of(Pair(), inputs, dims)
    assert len(exports) == 4 and all(len(export.shapes.symbols) == 2 - len(ones) for ones, export in exports.items())
    for n, k in itertools.product((1, 2, 6), (1, 5)):
        values = [torch.randn(2, n, 4), torch.randn(2, k, 4)]
        assert_same(padded_result(shapes, exports, values, 6), Pair()(*values))


@torch.no_grad()
@pytest.mark.parametrize("model", [Sum(), Squeezed()])
def test_a_size_of_1_means_what_pytorch_makes_of_it(model):
    inputs = torch.randn(3, 4), torch.randn(1, 4)
    shapes, exports = exports_of(model, inputs, {"x": {0: Dim("n", max=5)}, "y": None})
    for n in (1, 2, 5):
        values = [torch.randn(n, 4), torch.randn(1, 4)]
        assert_same(padded_result(shapes, exports, values, 5), model(*values))


@torch.no_grad()
def test_hints_that_turn_out_to_be_one_size():
    hint = {0: Dim.AUTO(min=1, max=8)}
    shapes, exports = exports_of(Sum(), (torch.randn(3, 4), torch.randn(3, 4)), {"x": hint, "y": hint})
    assert len(exports[frozenset()].shapes.symbols) == 1
    for n, k in ((5, 5), (1, 6), (1, 1)):
        values = [torch.randn(n, 4), torch.randn(k, 4)]
        assert_same(padded_result(shapes, exports, values, 8), Sum()(*values))
    with pytest.raises(InputError, match=r"it must be x\[0\] = 5"):
        padded_result(shapes, exports, [torch.randn(5, 4), torch.randn(6, 4)], 8)


@torch.no_grad()
def test_a_multiple_of_a_size():
    double = {0: 2 * Dim("m", min=2, max=4)}
    shapes, exports = exports_of(Sum(), (torch.randn(6, 4), torch.randn(6, 4)), {"x": double, "y": double})
    for n in (4, 8):
        values = [torch.randn(n, 4), torch.randn(n, 4)]
        assert_same(padded_result(shapes, exports, values, 4), Sum()(*values))


def test_a_model_that_refuses_a_part_of_the_range():
    class Branch(nn.Module):
        def forward(self, x, y):
            return x * 2 if x.shape[0] > 4 else x

    class NotOne(nn.Module):
        def forward(self, x, y):
            if x.shape[0] == 1:
                raise ValueError("one row is too few")
            return x

    inputs, dims = (torch.randn(3, 4), torch.randn(1, 4)), {"x": {0: Dim("n", max=8)}, "y": None}
    with pytest.raises(ExportError, match=r"range of shapes: it takes x\[0\] up to 4, .* max=4, or") as error:
        exports_of(Branch(), inputs, dims)
    assert "\n" not in str(error.value) and "Suggested fixes" in str(error.value.__cause__)
    with pytest.raises(ExportError, match=r"(?s)whole range of shapes where x\[0\] is 1; .*one row is too few"):
        exports_of(NotOne(), inputs, dims)


def test_what_fails_at_any_shape_is_no_matter_of_the_range():
    words = nn.Embedding(4, 4)
    with pytest.raises(
        ExportError, match="^torch.export could not export Embedding: .* scalar types: Long, Int; but got"
    ):
        exports_of(words, (torch.randn(3, 4),), {"input": {0: Dim("n", max=8)}})


def test_assertions_of_a_program_hold_at_each_call():
    class Even(nn.Module):
        def forward(self, x):
            torch._check(x.shape[0] % 2 == 0)
            return x.reshape(-1, 2, 4).sum(1)

    program = torch.export.export(Even(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim.AUTO(min=2, max=8)},))
    export = export_of_program(program, range_of_program(program), None)
    assert list(export.numbers([torch.randn(4, 4)]).values()) in ([4], [2])
    with pytest.raises(InputError):
        export.numbers([torch.randn(5, 4)])


class Masked(nn.Module):
    """Attention with a mask that the model keeps for its longest input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).tril()[None])

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(self.mask[:, : x.shape[1], : x.shape[1]] == 0, -torch.inf)
        return scores.softmax(-1) @ x, x[:, :3].mean(1), self.mask[0, :4, 8 - x.shape[1] :].sum(1)


class Pooled(nn.Module):
    """It has no pooled rows' dimension where there is one."""

    def forward(self, x):
        return torch.nn.functional.avg_pool1d(x.mT, 2).squeeze(-1)


@torch.no_grad()
def test_a_table_as_long_as_the_longest_input():
    shapes, exports = exports_of(Masked(), (torch.randn(2, 5, 4),), {"x": {1: Dim("n", min=1, max=8)}})
    assert len(exports) == 2
    for n in range(1, 9):
        values = [torch.randn(2, n, 4)]
        assert_same(padded_result(shapes, exports, values, 8), Masked()(*values))


def test_what_the_model_asks_itself_is_refused():
    class Asks(Masked):
        def forward(self, x):
            return super().forward(x)[0] * (2 if x.shape[1] == 8 else 1)

    with pytest.raises(ExportError, match="not exported for the whole range of shapes"):
        exports_of(Asks(), (torch.randn(2, 5, 4),), {"x": {1: Dim("n", min=1, max=8)}})


@torch.no_grad()
def test_sizes_that_may_become_1():
    inputs = (torch.randn(2, 5, 4),)
    shapes, exports = exports_of(Pooled(), inputs, {"x": {1: Dim("n", min=4, max=8)}})
    for n in range(4, 9):
        values = [torch.randn(2, n, 4)]
        assert_same(padded_result(shapes, exports, values, 8), Pooled()(*values))
    with pytest.raises(ExportError, match="not exported for the whole range of shapes"):
        exports_of(Pooled(), inputs, {"x": {1: Dim("n", min=2, max=8)}})
