"""Padded programs run in PyTorch with poison for padding: NaN in floats, any of the real elements in integers."""

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from stof_tvm.buckets.bucket import Cut
from stof_tvm.frontend.export import decompose
from stof_tvm.frontend.padding.dims import Number
from stof_tvm.frontend.padding.program import PaddedProgram, pad
from stof_tvm.frontend.shape_range import range_of_program

SIZES = [(5, 8), (9, 16)]  # (the real length, the bucket's); the batch is 2 of 3


class Model(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def exported(model, example: tuple, dynamic: list[dict] | None = None, least: int = 2, most: int = 64):
    """A functional program of (batch, length, …) inputs, whose first two dimensions are dynamic by default."""
    batch, length = Dim("batch", min=2, max=8), Dim("length", min=least, max=most)
    dims = dynamic or [{0: batch, 1: length}] * len(example)
    dims = [{axis: {"b": batch, "n": length}.get(dim, dim) for axis, dim in own.items()} for own in dims]
    with torch.no_grad():
        spec = {"inputs": tuple(dims)} if isinstance(model, Model) else tuple(dims)
        program = torch.export.export(model.eval(), example, dynamic_shapes=spec, strict=False)
    return decompose(program, is_dynamic=True), range_of_program(program)


def poisoned(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """An input at larger sizes."""
    if x.is_floating_point() or x.is_complex():
        padded = torch.full(shape, float("nan"), dtype=x.dtype)
    else:
        padded = x.flatten()[torch.randint(0, x.numel(), shape)]
    padded[tuple(slice(0, n) for n in x.shape)] = x
    return padded


def padded_for(program, shapes, values: list, sizes: list[int], has_masks=False) -> tuple[PaddedProgram, dict, dict]:
    """(the padded program, the call's numbers, the bucket's); `sizes` are of the symbols, in order."""
    numbers = shapes.numbers(values)
    bucket = dict(zip(shapes.symbols, sizes, strict=True))
    least = {symbol: shapes.limits[symbol][0] for symbol in bucket}
    return pad(program, bucket, least, has_masks), numbers, bucket


def run_poisoned(program, shapes, values: list, sizes: list[int]) -> list:
    """What a padded program computes in the places of a call that are no padding."""
    padded, numbers, bucket = padded_for(program, shapes, values, sizes)
    inputs = [
        poisoned(x, [n if isinstance(n, int) else int(n.subs(bucket)) for n in shape])
        for x, shape in zip(values, shapes.shapes, strict=True)
    ]
    args, kwargs = shapes.signature.nest_inputs(inputs)
    with torch.no_grad():
        found = pytree.tree_leaves(padded.program.module()(*args, **kwargs, **padded.numbers(numbers)))
    results = []
    for x, known in zip(found, padded.outputs, strict=True):
        if isinstance(known, tuple):
            results.append(Cut.of(known, bucket, numbers)(x))
        else:
            results.append(known.at(numbers) if isinstance(known, Number) else known)
    return results


def assert_same(found: list, expected) -> None:
    """The leaves of a result are those of the model's, but for roundings."""
    with torch.no_grad():
        leaves = pytree.tree_leaves(expected)
    assert len(found) == len(leaves)
    for x, y in zip(found, leaves):
        if isinstance(y, torch.Tensor):
            assert x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, equal_nan=True, atol=1e-5, rtol=1e-5)
        else:
            assert x == y
