"""How long a box is along each axis: arithmetic on lengths and on the strides of what is read."""

import math

from tir_kernels.fusion.steps import VECTOR

SHORTEST_RUN = 32  # elements that a box is long along either side, whatever their size


def last_axis(shape) -> int:
    """The last axis of more than one element."""
    return max((axis for axis, n in enumerate(shape) if n > 1), default=len(shape) - 1)


def box_extents(shape, strides, run: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box's extents, and the axes of its run in the results, outermost first.

    Where both runs are along the same axes, they are made longer until there is as much to do as in a square.  Where
    rows begin anywhere, the results' run is twice as long, as its ends are written in pieces.
    """
    wanted, best = run, None
    last = last_axis(shape)
    longer = 1 if shape[last] % VECTOR == 0 or run <= SHORTEST_RUN else 2
    while True:
        extents = [1] * len(shape)
        out_axes = _grown(
            extents, shape, [axis for axis in reversed(range(len(shape))) if shape[axis] > 1], wanted * longer
        )
        along, expected = [], 1
        for axis in sorted((a for a, stride in enumerate(strides) if stride > 0), key=lambda a: strides[a]):
            if strides[axis] != expected:
                break
            along.append(axis)
            expected *= shape[axis]
        _grown(extents, shape, along, wanted)
        volume = math.prod(extents)
        if best is not None and volume > 4 * run * run:
            return best
        best = tuple(extents), tuple(out_axes[::-1])
        if 2 * volume >= run * run or volume == math.prod(shape) or wanted > math.prod(shape):
            return best
        wanted *= 2


def _grown(extents: list[int], shape, axes, wanted: int) -> list[int]:
    """Make a box at least `wanted` long along `axes`, innermost first; the axes that it needs for that."""
    used, size = [], 1
    for axis in axes:
        used.append(axis)
        extents[axis] = max(extents[axis], _part(shape[axis], -(-wanted // size)))
        size *= extents[axis]
        if extents[axis] < shape[axis] or size >= wanted:
            break
    return used


def _part(n: int, wanted: int) -> int:
    """About `wanted` of n elements, in parts of nearly equal length."""
    if 2 * n <= 3 * wanted:
        return n
    even = -(-n // -(-n // wanted))
    return min(wanted, -(-even // VECTOR) * VECTOR)


def neighbours(shape, extents, strides) -> list[int]:
    """The axes of a box along which a source's elements are neighbours, innermost first."""
    found, expected = [], 1
    for axis in sorted((a for a, stride in enumerate(strides) if stride > 0), key=lambda a: strides[a]):
        if strides[axis] != expected or extents[axis] == 1:
            break
        found.append(axis)
        expected *= shape[axis]
        if extents[axis] < shape[axis]:
            break
    return found
