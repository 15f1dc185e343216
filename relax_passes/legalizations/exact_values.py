"""Values of small closed expressions that NumPy computes to the last bit, without compiling a program for them.

Masks and positions are arithmetic of integers and comparisons.  Compiling it took up to a third of a small model's
build; NumPy takes microseconds.
"""

import math

import numpy as np
from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, dtype_of, operator, static_shape
from relax_passes.ir.constant_arrays import array_of
from relax_passes.legalizations.exact_operators import OPERATORS

NUMBERS = (tirx.IntImm, tirx.FloatImm, relax.ShapeExpr)  # the operands that are no tensors


class ExactValues:
    """The arrays that closed expressions of a function are, in their shapes and dtypes, as far as NumPy knows them.

    Results of more than `largest` elements are not computed.
    """

    def __init__(self, bindings: Bindings, largest: int):
        self.bindings = bindings
        self.largest = largest
        self.found: dict[relax.Expr, np.ndarray | None] = {}  # variables and constants
        self.constants: dict[tuple, np.ndarray] = {}  # dtype, shape and numbers -> the first such constant
        self.computed: dict[tuple, np.ndarray | None] = {}  # operator and operands -> result: equal calls share one

    def of(self, expr) -> np.ndarray | None:
        """The values of a closed expression in its (shape, dtype), not to be written to; None if they are unknown."""
        pending = list(relax.analysis.free_vars(expr))
        while pending:  # not by recursion: programs are as long as they like
            var = pending[-1]
            unknown = [] if var in self.found else [x for x in self.bindings.reads[var] if x not in self.found]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            if var not in self.found:
                self.found[var] = self._value(self.bindings.values[var])
        return self._value(expr)

    def _value(self, expr) -> np.ndarray | None:
        """The values of an expression whose variables are in `found`."""
        if isinstance(expr, relax.Var):
            return self.found[expr]
        if isinstance(expr, GenericConst):
            if expr not in self.found:
                self.found[expr] = self._shared(array_of(expr))
            return self.found[expr]
        return self._result(expr) if isinstance(expr, relax.Call) else None

    def _shared(self, array: np.ndarray) -> np.ndarray:
        """The first constant that has these numbers, if they are few, so that what is computed from them is shared."""
        if array.size > self.largest:
            return array
        return self.constants.setdefault((array.dtype, array.shape, array.tobytes()), array)

    def _result(self, call: relax.Call) -> np.ndarray | None:
        name, shape = operator(call), static_shape(call)
        if name not in OPERATORS or shape is None or math.prod(shape) > self.largest:
            return None
        tensors = [x for x in self.bindings.operands(call) if not isinstance(x, NUMBERS)]
        arrays = [self._value(x) for x in tensors]
        if any(array is None for array in arrays):
            return None
        parameters, compute = OPERATORS[name]
        numbers = parameters(call)
        key = name, numbers, dtype_of(call), *map(id, arrays)
        if key not in self.computed:
            with np.errstate(over="ignore"):  # of scalars: arrays wrap around without a warning
                result = compute(numbers, *arrays)
            fits = result is not None and result.shape == shape and str(result.dtype) == dtype_of(call)
            self.computed[key] = result if fits else None
        return self.computed[key]
