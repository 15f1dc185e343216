"""Biases that only say how many keys take part: 0 for the keys before a number known at run time, -inf from it on.

So padding is masked whose length is an input.  Kernels read the number instead (AttentionProblem.key_counts): they
neither read a bias nor compute the blocks behind it.  Precondition: after `FoldMasks`, which gives such masks, however
they are written, the form where(keep, 0, -inf).
"""

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, dtype_of, operator, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.constant_arrays import array_of
from relax_passes.legalizations.closed_values import closed_values

op = relax.op
SAME_PLACES = ("reshape", "expand_dims", "squeeze")
NEGATED = {"less": "greater_equal", "greater_equal": "less", "greater": "less_equal", "less_equal": "greater"}
SWAPPED = {"less": "greater", "greater": "less", "less_equal": "greater_equal", "greater_equal": "less_equal"}
LARGEST = 1 << 24  # numbers of places that are looked at


@dataclass(frozen=True)
class KeyCounts:
    """The first `numbers` + `more` keys take part.

    Attributes
    ----------
    numbers : Expr
        Integers, of one element or of one for each batch entry.
    count : int
        How many elements.
    more : int
        0, or 1 where the last key that takes part is given.
    """

    numbers: relax.Expr
    count: int
    more: int

    def emit(self, emit, visit, kv_len: int) -> relax.Var:
        """int32 (count,), 0 to kv_len: what kernels read."""
        numbers = emit(op.reshape(visit(self.numbers), (self.count,)))
        if dtype_of(numbers) != "int64":
            numbers = emit(op.astype(numbers, "int64"))
        # The limits come first: more than 32 bits hold may be given, and one more than 64 bits hold.
        numbers = emit(op.minimum(numbers, relax.const(kv_len, "int64")))
        numbers = emit(op.maximum(numbers, relax.const(-1, "int64")))
        if self.more:
            numbers = emit(op.add(numbers, relax.const(self.more, "int64")))
        return emit(op.astype(numbers, "int32"))


class KeyCountFinder:
    """Finds the KeyCounts of the biases of one function, each once."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self._closed: ClosedExpressions | None = None
        self._found: dict[relax.Expr, KeyCounts | None] = {}

    def of(self, bias: relax.Expr) -> KeyCounts | None:
        """The KeyCounts that a bias (B or 1, 1, 1, kv_len) stands for; None for any other bias."""
        if bias not in self._found:
            self._found[bias] = self._of(bias)
        return self._found[bias]

    def _of(self, bias: relax.Expr) -> KeyCounts | None:
        shape = static_shape(bias)
        if shape is None or len(shape) != 4 or shape[1:3] != (1, 1):
            return None
        batch, kv_len = shape[0], shape[3]
        fill = self.bindings.value(self._before(bias, kv_len))
        if operator(fill) != "where":
            return None
        keep, kept, dropped = fill.args
        if self.bindings.scalar(kept) != 0 or self.bindings.scalar(dropped) != -math.inf:
            return None
        comparison, is_negated = self.bindings.value(self._before(keep, kv_len)), False
        while operator(comparison) == "logical_not":
            comparison = self.bindings.value(self._before(comparison.args[0], kv_len))
            is_negated = not is_negated
        name = operator(comparison)
        if name not in NEGATED:
            return None
        name = NEGATED[name] if is_negated else name
        places, numbers = comparison.args
        if not self._is_closed(places):
            places, numbers, name = numbers, places, SWAPPED[name]
        if name not in ("less", "less_equal") or not all(dtype_of(x).startswith("int") for x in (places, numbers)):
            return None
        size = static_shape(numbers)
        if size is None or math.prod(size) != batch or (size and size[-1] != 1):
            return None
        return KeyCounts(numbers, batch, int(name == "less_equal")) if self._counts_up(places, kv_len) else None

    def _before(self, expr: relax.Expr, last: int) -> relax.Expr:
        """What `expr` is before it was given dimensions of size 1, its last one still `last` long."""
        while (call := self.bindings.call(expr, *SAME_PLACES)) is not None:
            shape, inner = static_shape(call), static_shape(call.args[0])
            if shape is None or not inner or inner[-1] != last:
                return expr
            if [n for n in shape[:-1] if n > 1] != [n for n in inner[:-1] if n > 1]:
                return expr
            expr = call.args[0]
        return expr

    def _is_closed(self, expr: relax.Expr) -> bool:
        if isinstance(self.bindings.value(expr), GenericConst):
            return True
        if self._closed is None:
            self._closed = ClosedExpressions(self.bindings)
        return expr in self._closed.closed_vars

    def _counts_up(self, places: relax.Expr, kv_len: int) -> bool:
        """Whether closed integers are 0, 1, 2 … along their last dimension, whatever the other indices."""
        shape = static_shape(places)
        if not shape or shape[-1] != kv_len or math.prod(shape) > LARGEST or not self._is_closed(places):
            return False
        value = self.bindings.value(places)
        if operator(value) == "arange" and len(shape) == 1:  # without compiling a program
            start, _, step = value.args
            return _number(start) == 0 and _number(step) == 1
        array = array_of(value) if isinstance(value, GenericConst) else closed_values(self.bindings, [places])[0]
        return bool((np.asarray(array).reshape(-1, kv_len) == np.arange(kv_len)).all())


def _number(expr) -> int | None:
    """An argument of an operator, where it is one integer."""
    value = expr if isinstance(expr, tvm.tirx.IntImm) else getattr(expr, "value", None)
    return int(value) if isinstance(value, tvm.tirx.IntImm) else None
