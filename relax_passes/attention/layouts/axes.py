"""Dimensions followed through reshapes and transposes: which part of which dimension is where."""

import itertools
import math
from collections.abc import Iterable


class Axis:
    """A dimension, or the part of one that a reshape splits off; `parts` are the outer and the inner one."""

    def __init__(self, size: int):
        self.size = size
        self.parts: tuple[Axis, Axis] | None = None

    def split(self, outer: int) -> "tuple[Axis, Axis]":
        """Its outer part, of this size, and its inner part."""
        self.parts = Axis(outer), Axis(self.size // outer)
        return self.parts


Layout = list[list[Axis]]  # of each dimension of a tensor, the axes that it is made of; none for a length of 1


def layout_of(shape: Iterable[int]) -> Layout:
    """A layout in which each dimension is an axis of its own."""
    return [[Axis(n)] if n != 1 else [] for n in shape]


def undivided(axes: Iterable[Axis]) -> list[Axis]:
    """The same axes with parts in place of those that were split."""
    found: list[Axis] = []
    for axis in axes:
        found += [axis] if axis.parts is None else undivided(axis.parts)
    return found


def flat(layout: Layout) -> list[Axis]:
    """All axes of a layout, in order."""
    return undivided(itertools.chain.from_iterable(layout))


def size(axes: Iterable[Axis]) -> int:
    """The number of elements along some axes."""
    return math.prod(axis.size for axis in axes)


def reshaped_layout(layout: Layout, shape: Iterable[int]) -> Layout | None:
    """The layout after a reshape; None where lengths have no whole parts in common."""
    axes, result = flat(layout), []
    for length in shape:
        dimension: list[Axis] = []
        while length > 1:
            axis = axes.pop(0)
            if length % axis.size == 0:
                dimension.append(axis)
                length //= axis.size
            elif axis.size % length == 0:
                outer, inner = axis.split(length)
                dimension.append(outer)
                axes.insert(0, inner)
                length = 1
            else:
                return None
        result.append(dimension)
    return result
