"""The places of a value's arguments that an element of it is computed from, as lists of expressions of TIR."""

import math
from collections.abc import Sequence

from tvm import tirx

from tir_kernels.fusion.group.problem import Value

Indices = list


def broadcast(indices: Sequence, shape: Sequence[int]) -> Indices:
    """The indices of an argument of `shape` whose broadcast has these indices: 0 where its extent is 1."""
    last = list(indices)[len(indices) - len(shape) :]
    return [tirx.IntImm("int32", 0) if n == 1 else index for n, index in zip(shape, last)]


def reshape(indices: Sequence, shape: Sequence[int], source: Sequence[int]) -> Indices:
    """The indices in `source` of the element that a reshape to `shape` has at `indices`.

    Dimensions are taken apart in groups of equal size, so that most indices pass through unchanged.
    """
    found: Indices = []
    i = j = 0
    while i < len(shape) or j < len(source):
        first_i, first_j = i, j
        left, right = 1, 1
        while True:
            if left <= right and i < len(shape) and (left < right or i == first_i or j == first_j and j >= len(source)):
                left *= shape[i]
                i += 1
            elif j < len(source):
                right *= source[j]
                j += 1
            else:
                break
            if left == right and i > first_i and j > first_j:
                break
        found += unflatten(flatten(indices[first_i:i], shape[first_i:i]), source[first_j:j])
    return found


def flatten(indices: Sequence, shape: Sequence[int]):
    """The position of an element in a contiguous tensor."""
    position = tirx.IntImm("int32", 0)
    for index, n in zip(indices, shape):
        position = position * n + index if n > 1 else position
    return position


def unflatten(position, shape: Sequence[int]) -> Indices:
    """The inverse of `flatten`."""
    found = []
    for axis, n in enumerate(shape):
        inner = math.prod(shape[axis + 1 :])
        index = tirx.floordiv(position, inner) if inner > 1 else position
        outermost = all(m == 1 for m in shape[:axis])
        found.append(tirx.IntImm("int32", 0) if n == 1 else index if outermost else tirx.floormod(index, n))
    return found


def of_view(value: Value, indices: Sequence, source: Sequence[int]) -> Indices:
    """The indices in its argument of shape `source` of a view with one argument; a pad's may lie outside."""
    if value.operator == "reshape":
        return reshape(indices, value.shape, source)
    if value.operator == "permute":
        return [indices[value.numbers.index(axis)] for axis in range(len(source))]
    if value.operator == "slice":
        pairs = zip(value.numbers[::2], value.numbers[1::2])
        return [first + index * step for index, (first, step) in zip(indices, pairs)]
    if value.operator == "take":
        axis, place, *steps = map(int, value.numbers)
        for index, step in zip(indices[axis:], steps):
            place = place + index * step
        place = place if isinstance(place, tirx.Expr) else tirx.IntImm("int32", place)
        return [*indices[:axis], place, *indices[axis + len(steps) :]]
    if value.operator == "roll":
        axis, first = map(int, value.numbers)
        return [*indices[:axis], tirx.floormod(indices[axis] + first, source[axis]), *indices[axis + 1 :]]
    if value.operator == "pad":
        return [index - before for index, before in zip(indices, value.numbers[1:])]
    return broadcast(indices, source)


def of_reduction(value, indices: Sequence, shape: Sequence[int], places: Sequence) -> list:
    """The indices of what a reduction of a tensor of `shape` reads for an element: `places` along its axes.

    The value leaves these axes out or has them as 1.
    """
    axes = [int(axis) for axis in value.numbers]
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    own = [indices[axis] for axis in kept] if len(indices) == len(shape) else list(indices)
    found = dict(zip(kept, own, strict=True)) | dict(zip(axes, places, strict=True))
    return [found[axis] for axis in range(len(shape))]
