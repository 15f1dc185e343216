"""Integers that are one number, given at run time, and constants added to it.

minimum(maximum(n, 6), 9) + arange(-2, 1)        n between 6 and 9, and -2, -1, 0
"""

from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, element_count, operator, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.same_values import same
from relax_passes.legalizations.closed_values import closed_values

UNKNOWN = 1 << 62  # a bound that is none
MOST = 1 << 24  # constants that are looked at
INTEGERS = ("int32", "int64")


@dataclass(frozen=True, eq=False)
class Anchor:
    """What integers are counted from: 0, or an integer of one element, `expr`, of `least` to `most`."""

    expr: relax.Expr | None = None
    least: int = 0
    most: int = 0


class Distances:
    """Finds the anchors of integers of a function.

    Attributes
    ----------
    anchors : list of Anchor
        Those found so far; the first is 0.
    """

    def __init__(self, bindings: Bindings):
        self.bindings, self._closed = bindings, ClosedExpressions(bindings)
        self.anchors = [Anchor()]

    def of(self, expr) -> tuple[Anchor, np.ndarray] | None:
        """(anchor, int64 distances from it in the shape of `expr`); None where an expression is no such integers."""
        found = self._found(expr)
        return None if found is None else (self._anchor(found[0]), found[1])

    def _found(self, expr) -> tuple[relax.Expr | None, np.ndarray] | None:
        """(base, or None for 0; distances)."""
        shape = static_shape(expr)
        if shape is None or dtype_of(expr) not in INTEGERS or not 0 < np.prod(shape) <= MOST:
            return None
        if self._is_closed(expr):
            return None, self._values(expr)
        value = self.bindings.value(expr)
        name = operator(value)
        if name in SAME_ELEMENTS or name == "broadcast_to" or (name == "astype" and dtype_of(value) == "int64"):
            inner = self._found(value.args[0])
            if inner is None:
                return None
            base, distances = inner
            return base, np.broadcast_to(distances, shape) if name == "broadcast_to" else distances.reshape(shape)
        if name in ("add", "subtract") and dtype_of(value) == "int64":
            one, other = value.args
            if name == "add" and self._is_closed(one):
                one, other = other, one
            if self._is_closed(other) and (inner := self._found(one)) is not None:
                base, distances = inner
                constants = self._values(other)
                return base, np.subtract(distances, constants) if name == "subtract" else distances + constants
        return (expr, np.zeros(shape, np.int64)) if element_count(expr) == 1 else None

    def _is_closed(self, expr) -> bool:
        return isinstance(expr, GenericConst) or self._closed.is_closed(expr)

    def _values(self, expr) -> np.ndarray:
        return closed_values(self.bindings, [expr])[0].astype(np.int64)

    def _anchor(self, base) -> Anchor:
        if base is None:
            return self.anchors[0]
        for anchor in self.anchors[1:]:
            if same(self.bindings, anchor.expr, base):
                return anchor
        self.anchors.append(Anchor(base, *self._bounds(base)))
        return self.anchors[-1]

    def _bounds(self, expr) -> tuple[int, int]:
        """(least, most) that an integer of one element can be, UNKNOWN where that is not known."""
        if self._is_closed(expr):
            (number,) = self._values(expr).reshape(-1)
            return int(number), int(number)
        value = self.bindings.value(expr)
        name = operator(value)
        if name in SAME_ELEMENTS:
            return self._bounds(value.args[0])
        if name not in ("maximum", "minimum", "multiply") or dtype_of(value) != "int64":
            return -UNKNOWN, UNKNOWN
        if any(element_count(x) != 1 for x in value.args):
            return -UNKNOWN, UNKNOWN
        (a, b), (c, d) = (self._bounds(x) for x in value.args)
        if name == "multiply":
            products = [x * y for x in (a, b) for y in (c, d)]
            if max(map(abs, products)) >= UNKNOWN:  # those that 64 bits do not hold are other numbers
                return -UNKNOWN, UNKNOWN
            return min(products), max(products)
        choose = max if name == "maximum" else min
        return choose(a, c), choose(b, d)
