"""Bounds on the elements of an expression that hold for all inputs: they follow from norms, weights, tanh and the like.

A finite fill value masks only scores that stay above it.  Queries and keys are products of normalised states by
constant weights in nearly every Transformer, so how large their scores can get is known when the model is compiled.
"""

import math

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of, largest_magnitude
from relax_passes.ir.floats import FLOATS

DEEPEST = 100  # operators in a row without a norm; their bound would be too large to be of use
ROUNDING = 1.02  # more than what rounding in bfloat16 adds to a result
UNCHANGED = (
    *("reshape", "expand_dims", "squeeze", "flatten", "permute_dims", "broadcast_to", "repeat", "tile", "negative"),
    *("strided_slice", "split", "take", "gather_elements", "tril", "triu"),
    *("abs", "nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu"),
)
MOVED = (*SAME_ELEMENTS, "permute_dims", "broadcast_to", "repeat", "tile", "strided_slice")
AT_MOST_ONE = ("tanh", "sigmoid", "sin", "cos", "nn.softmax", "erf")


class Magnitudes:
    """Upper bounds of absolute values in one function, computed once for each variable; inf where nothing is known.

    Bounds hold for finite inputs: a norm of infinite elements is NaN, which no bound covers.
    """

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self._known = {}
        self._depth = 0

    def of(self, expr) -> float:
        """The largest absolute value that an element of `expr` can have."""
        expr = self.bindings.value(expr)
        if expr not in self._known:
            self._depth += 1
            self._known[expr] = self._bound(expr) if self._depth < DEEPEST else math.inf
            self._depth -= 1
        return self._known[expr]

    def largest(self, expr, negate: bool = False) -> float:
        """The largest element that `expr` can have, or -`expr` if `negate`: of a mask that is added, perhaps 0."""
        expr = self.bindings.value(expr)
        number = self.bindings.scalar(expr)
        if number is not None:
            return -number if negate else number
        if isinstance(expr, GenericConst):
            array = array_of(expr).astype(np.float64)
            return math.inf if np.isnan(array).any() else float((-array if negate else array).max(initial=-math.inf))
        name = operator(expr)
        if name in MOVED or name == "astype" and dtype_of(expr.args[0]) in FLOATS:
            return self.largest(expr.args[0], negate)
        if name == "astype" and dtype_of(expr.args[0]) == "bool":
            return 0.0 if negate else 1.0
        if name == "negative":
            return self.largest(expr.args[0], not negate)
        if name == "where":
            return max(self.largest(x, negate) for x in expr.args[1:])
        if name in ("add", "subtract"):
            other = self.largest(expr.args[1], negate != (name == "subtract"))
            first = self.largest(expr.args[0], negate)
            return math.inf if math.inf in (first, other) else first + other
        if name == "multiply":
            for x, factor in (expr.args, (expr.args[1], expr.args[0])):
                number = self.bindings.scalar(factor)
                if number is not None and math.isfinite(number):
                    bound = self.largest(x, negate != (number < 0))
                    return bound if math.isinf(bound) else abs(number) * bound
        return self.of(expr)

    def of_scores(self, q, k) -> float:
        """The largest absolute value of a dot product of a row of q with a row of k, both (…, D)."""
        dim = static_shape(q)
        bounds = self.of(q), self.of(k)
        return math.inf if dim is None else 0.0 if 0 in bounds else dim[-1] * math.prod(bounds)

    def _bound(self, expr) -> float:
        if isinstance(expr, GenericConst):
            return largest_magnitude(array_of(expr))
        if isinstance(expr, relax.TupleGetItem):
            return self.of(expr.tuple_value)
        name = operator(expr)
        if name in UNCHANGED:
            return self.of(expr.args[0])
        if name in AT_MOST_ONE:
            return ROUNDING
        rule = getattr(self, "_" + name.replace(".", "_"), None) if name else None
        return math.inf if rule is None else rule(expr) * ROUNDING

    def _astype(self, call):
        if dtype_of(call.args[0]) == "bool":
            return 1.0
        return self.of(call.args[0]) if "float" in dtype_of(call) else math.inf

    def _concat(self, call):
        parts = self.bindings.value(call.args[0])
        return max(map(self.of, parts.fields)) if isinstance(parts, relax.Tuple) else math.inf

    def _where(self, call):
        return max(self.of(call.args[1]), self.of(call.args[2]))

    def _add(self, call):
        return self.of(call.args[0]) + self.of(call.args[1])

    _subtract = _add

    def _multiply(self, call):
        a, b = map(self.of, call.args)
        return 0.0 if 0 in (a, b) else a * b

    def _divide(self, call):
        if self._is_norm(call.args[1], call.args[0]):
            return 1.0
        number = self.bindings.scalar(call.args[1])
        return self.of(call.args[0]) / abs(number) if number else math.inf

    def _is_norm(self, expr, x) -> bool:
        """Whether `expr` is the Euclidean norm of rows of `x`, summed in float32, or more than it."""
        value = self.bindings.value(expr)
        while (name := operator(value)) in ("maximum", "add", "astype", "broadcast_to"):
            number = self.bindings.scalar(value.args[1]) if name in ("maximum", "add") else 0.0
            if number is None or number < 0:
                return False
            value = self.bindings.value(value.args[0])
        total = self.bindings.call(value.args[0], "sum") if name == "sqrt" else None
        if total is None or not total.attrs.keepdims or dtype_of(total) != "float32":
            return False
        squares = self.bindings.call(total.args[0], "multiply", "square")
        return squares is not None and all(self._uncast(y).same_as(self._uncast(x)) for y in squares.args)

    def _uncast(self, expr):
        """What an expression is bound to, before casts of floating-point numbers."""
        while (call := self.bindings.call(expr, "astype")) is not None and "float" in dtype_of(call.args[0]):
            expr = call.args[0]
        return self.bindings.value(expr)

    def _nn_layer_norm(self, call):
        """The bound of n normalised elements: none exceeds sqrt(n)."""
        size = math.prod(shape_of(call)[int(axis)] for axis in call.attrs.axes)
        return math.sqrt(size) * self.of(call.args[1]) + self.of(call.args[2])

    def _nn_rms_norm(self, call):
        size = math.prod(shape_of(call)[int(axis)] for axis in call.attrs.axes)
        return math.sqrt(size) * self.of(call.args[1])

    def _matmul(self, call):
        """The bound of x @ y: for a constant y (k, n), that of x times the largest sum of a column of |y|."""
        weight, transposed = self.bindings.value(call.args[1]), False
        if operator(weight) == "permute_dims" and weight.attrs.axes is None or _swaps_two(weight):
            weight, transposed = self.bindings.value(weight.args[0]), True
        bound = self.of(call.args[0])
        if not isinstance(weight, GenericConst) or len(shape_of(weight)) != 2:
            other = self.of(call.args[1])
            return 0.0 if 0 in (bound, other) else shape_of(call.args[0])[-1] * bound * other
        if math.isinf(bound):
            return bound
        array = array_of(weight)
        wide = array.astype(np.float32) if array.dtype.itemsize == 2 else array
        sums = np.abs(wide).sum(1 if transposed else 0)
        return bound * float(sums.max(initial=0.0))


def _swaps_two(call) -> bool:
    axes = call.attrs.axes if operator(call) == "permute_dims" else None
    return axes is not None and [int(axis) % 2 for axis in axes] == [1, 0] and len(axes) == 2
