"""FoldConditions: a choice between two values that constants decide alike everywhere becomes one of them.

    where(all false, fill, scores)     becomes     scores

Models without padding mask nothing, and gathers ask whether constant places lie inside.  Such a choice hides scores
from the matchers, and its fill may be -inf, NaN or the least finite number, whose effect no bound tells.

Preconditions: "main" is one dataflow block with constants bound.  Conditions are looked through views and logical
operators, so that what is broadcast is not computed; comparisons with numbers are looked at before they are made.
"""

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, element_count, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from relax_passes.legalizations.closed_values import closed_values
from relax_passes.legalizations.exact_operators import COMPARISONS

VIEWS = ("reshape", "expand_dims", "squeeze", "flatten", "permute_dims", "broadcast_to", "tile", "repeat")
NOT = ("logical_not", "bitwise_not")
AND, OR = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or")
LARGEST = 4_000_000  # elements of what is computed to decide a condition


@tvm.transform.module_pass(opt_level=0, name="FoldConditions")
class FoldConditions:
    """Replace every `where` of "main" whose condition is the same constant everywhere."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        choices = {var: call for var in bindings.values if (call := bindings.call(var, "where")) is not None}
        conditions = _Conditions(bindings)
        for call in choices.values():
            conditions.ask(call.args[0])
        conditions.compute()
        decided = {var: found for var, call in choices.items() if (found := conditions.truth(call.args[0])) is not None}
        if not decided:
            return mod

        def replace(_builder, var, new):
            if var not in decided or bindings.values[var] is not choices[var]:
                return None
            chosen = choices[var].args[1 if decided[var] else 2]
            if shape_of(chosen) == shape_of(var):
                return new(chosen)
            return relax.op.broadcast_to(new(chosen), shape_of(var))

        return rebuild(mod, replace)


class _Conditions:
    """Whether conditions hold everywhere, nowhere, or neither; the arrays that they need are computed together."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.is_closed = ClosedExpressions(bindings).is_closed
        self.needed: dict[relax.Expr, None] = {}
        self.values: dict[relax.Expr, np.ndarray] = {}

    def ask(self, expr) -> None:
        """Note what is needed to decide a condition."""
        self._truth(expr, lambda found: self.needed.setdefault(found))

    def compute(self) -> None:
        """Compute everything that was noted."""
        self.values = dict(zip(self.needed, closed_values(self.bindings, list(self.needed))))

    def truth(self, expr) -> bool | None:
        """True or False if the condition is that everywhere, else None."""
        return self._truth(expr, self.values.get)

    def _truth(self, expr, array_of: Callable) -> bool | None:
        call = self.bindings.value(expr)
        name = operator(call)
        if name in VIEWS:
            return self._truth(call.args[0], array_of)
        if name in NOT:
            found = self._truth(call.args[0], array_of)
            return None if found is None else not found
        if name in (*AND, *OR):
            both = [self._truth(argument, array_of) for argument in call.args]
            decisive = name in OR  # one such operand decides
            return decisive if decisive in both else (not decisive) if None not in both else None
        if name in COMPARISONS:
            number = self.bindings.scalar(call.args[1])
            array = None if number is None else self._array(call.args[0], array_of)
            return None if array is None else _everywhere(COMPARISONS[name](array, number))
        array = self._array(call.args[0] if name == "astype" else expr, array_of)
        return None if array is None else _everywhere(array != 0)

    def _array(self, expr, array_of: Callable) -> np.ndarray | None:
        """The values of an expression before views, if they are known and few."""
        while operator(self.bindings.value(expr)) in VIEWS:
            expr = self.bindings.value(expr).args[0]
        count = element_count(expr)
        return array_of(expr) if count is not None and count <= LARGEST and self.is_closed(expr) else None


def _everywhere(array: np.ndarray) -> bool | None:
    return True if array.all() else None if array.any() else False
