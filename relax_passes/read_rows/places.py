"""Where the rows of a selection lie in a tensor: along one axis, also where a reshape has merged it with others.

    (B, S, H*D)        rows along axis 1
    (B*S, K)           rows along axis 0, B times S of them: `outer` is B

A place is a digit of the index along an axis.  A selection that takes other rows in each batch entry has a place of the
batch, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


class NotMoved(Exception):
    """A selection cannot be moved before an operator."""


@dataclass(frozen=True)
class Digit:
    """Index i along `axis` is (i0 * size + digit) * inner + i1, with i0 < outer."""

    axis: int
    size: int
    outer: int = 1

    def inner(self, shape: Sequence[int]) -> int:
        """How many elements of the axis have the same digit in a row."""
        if not 0 <= self.axis < len(shape) or shape[self.axis] % (self.outer * self.size):
            raise NotMoved
        return shape[self.axis] // (self.outer * self.size)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> "Digit":
        """The same digit after a reshape; NotMoved where it is no digit of an axis."""
        before = math.prod(old[: self.axis]) * self.outer
        for axis, length in enumerate(new):
            first = math.prod(new[:axis])
            if first <= before < first * length:
                if before % first == 0 and length % (before // first * self.size) == 0:
                    return Digit(axis, self.size, before // first)
                break
        raise NotMoved

    def moved(self, axis: int) -> "Digit":
        """The same along another axis."""
        return replace(self, axis=axis)


@dataclass(frozen=True)
class Place:
    """The rows, and the batch where its entries have rows of their own."""

    rows: Digit
    batch: Digit | None = None

    @property
    def axes(self) -> set[int]:
        """The axes that hold a digit."""
        return {self.rows.axis} | (set() if self.batch is None else {self.batch.axis})

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> "Place":
        """The place after a reshape; NotMoved where there is none."""
        return self._mapped(lambda digit: digit.reshaped(old, new))

    def moved(self, axis_of) -> "Place":
        """The place with each axis replaced by `axis_of(axis)`."""
        return self._mapped(lambda digit: digit.moved(axis_of(digit.axis)))

    def _mapped(self, change) -> "Place":
        return Place(change(self.rows), None if self.batch is None else change(self.batch))

    def narrowed(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape with `count` rows."""
        axis, size = self.rows.axis, self.rows.size
        return (*shape[:axis], shape[axis] // size * count, *shape[axis + 1 :])

    def apart(self, shape: Sequence[int]) -> tuple[tuple[int, ...], "Place"]:
        """The shape in which each digit is an axis of its own, and its place there."""
        sizes: list[int] = []
        found: dict[Digit, Digit] = {}
        digits = [self.rows] if self.batch is None else [self.rows, self.batch]
        for axis, length in enumerate(shape):
            before = 1  # the elements of the axis that are in `sizes` already
            for digit in sorted((x for x in digits if x.axis == axis), key=lambda x: x.outer):
                if digit.outer % before or length % (digit.outer * digit.size):
                    raise NotMoved
                if digit.outer > before:
                    sizes.append(digit.outer // before)
                found[digit] = Digit(len(sizes), digit.size)
                sizes.append(digit.size)
                before = digit.outer * digit.size
            if before == 1 or length > before:
                sizes.append(length // before)
        return tuple(sizes), self._mapped(found.__getitem__)


@dataclass(frozen=True)
class Spread:
    """The place in an operand that broadcasts along the batch, whose entries have rows of their own.

    The selected operand has `rank` axes, the batch along `batch` and the rows along the one at `place`.
    """

    rows: Digit  # in the operand itself
    rank: int
    batch: int  # axis
    place: int  # axis
