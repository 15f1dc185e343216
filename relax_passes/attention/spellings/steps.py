"""From a softmax back to q·kᵀ: the steps that the scores go through, in the order of computation, dtypes included.

Each step keeps the exact meaning of its operator.  It must turn floating-point scores into floating-point scores of the
same shape.  Everything else raises `NotAttention` with the reason; the scores then stay as the model computes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, element_count, operator, shape_of, static_shape
from relax_passes.ir.floats import FLOATS

UNREACHED = 1e30  # finite scores that high do not occur in a computation that has not overflowed
LARGEST_HALF = 65504.0


class NotAttention(Exception):
    """Why a softmax between two matrix products is not an attention that the composite can express."""


@dataclass(frozen=True)
class Step:
    """One operation on the scores, which have shape `shape` and dtype `dtype` after it.

    kind is "scale" (multiply by `number`), "factor" (multiply by `operand`, which has one number for all keys of a
    query or for all queries of a key; divide by it if `negate`), "tanh" (before it come only factors and casts), "add"
    (`operand`, subtracted if `negate`), "fill" (scores become `number` where the boolean `operand` is false, or true if
    `negate`), "floor" (at least `number`), "cast" (to `dtype`) or "shift" (subtract one number from each row, which
    changes no softmax).
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    number: float = 0.0
    operand: relax.Expr | None = None
    negate: bool = False


class ScoresTrace:
    """Walks from the softmax's operand back to q·kᵀ, collecting the steps in the order of computation."""

    def __init__(self, bindings: Bindings, is_row_constant: Callable | None = None):
        self.bindings = bindings
        self.shapes: list[tuple[int, ...]] = []  # of reshaped scores
        self.is_row_constant = is_row_constant or (lambda shift, scores: False)

    def trace(self, expr) -> tuple[relax.Call, list[Step]]:
        """(the product q·kᵀ, the steps after it)."""
        call = self.bindings.value(expr)
        name = operator(call)
        if name and (dtype := dtype_of(call)) not in FLOATS:
            raise NotAttention(f"the scores are {dtype} after {call.op.name}")
        if name == "matmul":
            if is_product_of_states(self.bindings, call):
                return call, []
            raise NotAttention("the product before the softmax has a constant operand or other leading dimensions")
        step = getattr(self, f"_{name}", None)
        if step is None:
            inner = self.bindings.same_elements(call)
            if inner is not None:
                return self._reshaped(call, inner)
            raise NotAttention(f"{call.op.name if name else 'a variable'} stands between q·kᵀ and the softmax")
        return step(call)

    def _reshaped(self, call, inner):
        before, after = shape_of(inner), shape_of(call)
        if before[-2:] != after[-2:]:
            raise NotAttention(f"the scores are reshaped from {before} to {after}")
        self.shapes += [after, before]
        return self.trace(inner)

    def _extend(self, call, inner, kind, **fields):
        before, after = static_shape(inner), static_shape(call)
        if before != after or after is None:
            raise NotAttention(f"{call.op.name} broadcasts the scores from {before} to {after}")
        scores, steps = self.trace(inner)
        return scores, [*steps, Step(kind, after, dtype_of(call), **fields)]

    def _multiply(self, call):
        number, inner = factor(self.bindings, call)
        if number is None:
            return self._scaled_by_tensor(call)
        return self._extend(call, inner, "scale", number=number)

    _divide = _multiply

    def _scaled_by_tensor(self, call):
        """A factor of q or k: a number for each head, query or key, as learned temperatures are, not for each pair."""
        divides = operator(call) == "divide"
        for index in (0,) if divides else (0, 1):
            scores, numbers = call.args[index], call.args[1 - index]
            if self.bindings.scalar(numbers) is not None or not comes_from_product(self.bindings, scores):
                continue
            if dtype_of(numbers) not in FLOATS or static_shape(numbers) is None or static_shape(scores) is None:
                continue
            while (inner := self.bindings.call(numbers, "broadcast_to")) is not None:
                numbers = inner.args[0]
            if all(n > 1 for n in (1, 1, *shape_of(numbers))[-2:]):
                raise NotAttention(f"{call.op.name} of the scores by a tensor that has a number for each pair")
            return self._extend(call, scores, "factor", operand=numbers, negate=divides)
        raise NotAttention(f"{call.op.name} of the scores by a tensor, or by no finite number")

    def _negative(self, call):
        return self._extend(call, call.args[0], "scale", number=-1.0)

    def _add(self, call):
        refusals = []
        for index in (0, 1):
            try:
                return self._extend(call, call.args[index], "add", operand=self._summand(call, 1 - index))
            except NotAttention as refusal:
                refusals.append(refusal)
        is_scores = [comes_from_product(self.bindings, arg) for arg in call.args]
        raise refusals[1] if is_scores == [False, True] else refusals[0]

    def _subtract(self, call):
        if self.bindings.value(call.args[0]).same_as(self.bindings.value(call.args[1])):  # what x * 0 is imported as
            return self._extend(call, call.args[0], "scale", number=0.0)
        if self.is_row_constant(call.args[1], call.args[0]):
            return self._extend(call, call.args[0], "shift")
        return self._extend(call, call.args[0], "add", operand=self._summand(call, 1), negate=True)

    def _summand(self, call, index):
        if (dtype := dtype_of(call.args[index])) not in FLOATS:
            raise NotAttention(f"{dtype} is added to the scores")
        return call.args[index]

    def _where(self, call):
        condition, *values = call.args
        if self._tells_nan(condition, values[0]):
            return self.trace(values[1])
        if dtype_of(condition) != "bool":
            raise NotAttention(f"where chooses by a condition of dtype {dtype_of(condition)}")
        for index in (1, 0):
            number = self.bindings.scalar(values[index])
            if number is not None and number < 0:
                return self._extend(
                    call, values[1 - index], "fill", number=number, operand=condition, negate=index == 0
                )
            if number is not None:
                raise NotAttention(f"where replaces scores by {number:g}, which masks nothing")
        raise NotAttention("where chooses between scores and a tensor")

    def _tells_nan(self, condition, value) -> bool:
        """Whether a `where` only restores the NaNs of `value`, which TVM's maximum loses."""
        test = self.bindings.call(condition, "isnan")
        return test is not None and self.bindings.value(test.args[0]).same_as(self.bindings.value(value))

    def _maximum(self, call):
        for index in (1, 0):
            number = self.bindings.scalar(call.args[index])
            if number is not None and math.isfinite(number):
                return self._extend(call, call.args[1 - index], "floor", number=number)
        raise NotAttention("maximum of the scores with a tensor")

    def _minimum(self, call):
        """Nothing, with a number that no finite score exceeds."""
        for index in (1, 0):
            number = self.bindings.scalar(call.args[index])
            if number is None:
                continue
            if number < (LARGEST_HALF if dtype_of(call) == "float16" else UNREACHED):
                raise NotAttention(f"minimum of the scores with {number:g}, which is a bound of the model's own")
            if static_shape(call) == static_shape(call.args[1 - index]):
                return self.trace(call.args[1 - index])
        raise NotAttention("minimum of the scores with a tensor")

    def _astype(self, call):
        return self._extend(call, call.args[0], "cast")

    def _tanh(self, call):
        """A cap, unless scores that are masked, biased or capped already are bounded."""
        scores, steps = self._extend(call, call.args[0], "tanh")
        if any(step.kind not in ("scale", "factor", "cast") for step in steps[:-1]):
            raise NotAttention(f"{call.op.name} stands between q·kᵀ and the softmax")
        return scores, steps

    def _broadcast_to(self, call):
        if static_shape(call) != static_shape(call.args[0]):
            raise NotAttention(f"the scores are broadcast from {static_shape(call.args[0])} to {static_shape(call)}")
        return self.trace(call.args[0])


def factor(bindings: Bindings, call):
    """(number, x) where the call is number * x in floating point and the number is finite, or (None, None)."""
    divide = operator(call) == "divide"
    for index in (1,) if divide else (1, 0):
        number = bindings.scalar(call.args[index])
        if number is None or dtype_of(call) not in FLOATS or (divide and number == 0):
            continue
        number = 1.0 / number if divide else number
        return (number, call.args[1 - index]) if math.isfinite(number) else (None, None)
    return None, None


def is_product_of_states(bindings: Bindings, matmul) -> bool:
    """Whether this is q·kᵀ of equal ranks, not a projection by a weight."""
    a, b = (static_shape(x) for x in matmul.args)
    if a is None or b is None or len(a) != len(b) or shape_of(matmul)[:-2] != a[:-2]:
        return False
    return len(a) > 2 or not any(bindings.is_weight(_source(bindings, x)) for x in matmul.args)


def comes_from_product(bindings: Bindings, expr) -> bool:
    """Whether `expr` comes from a product like q·kᵀ, through operators that keep the number of elements."""
    pending, seen = [expr], set()
    while pending:
        expr = pending.pop()
        call = bindings.value(expr)
        if operator(call) == "matmul":
            if all(len(x.ty.shape) > 1 for x in call.args) and len(call.args[0].ty.shape) == len(call.args[1].ty.shape):
                return True
        elif operator(call):
            for arg in call.args:
                if isinstance(arg, relax.Var) and arg not in seen and element_count(arg) == element_count(call):
                    seen.add(arg)
                    pending.append(arg)
    return False


def _source(bindings, expr):
    """The value of `expr` before transposes, reshapes and casts."""
    while (call := bindings.call(expr, "permute_dims", "reshape", "astype")) is not None:
        expr = call.args[0]
    return bindings.value(expr)
