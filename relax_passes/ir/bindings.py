"""Questions about the bindings of a Relax function: a variable's value, its readers, whether it is one number."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import ml_dtypes  # noqa: F401  (makes bfloat16 a dtype of NumPy)
import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.constant_arrays import array_of
from tir_kernels.errors import UnsupportedError

WEIGHTS = "stof.weights"  # of a function: names of the parameters that are weights, which no call changes
# Of a function, JSON: how many results are the caller's, and for each state, a tensor that calls update, the numbers of
# its parameter and of the result that is its new value.
STATES = "stof.states"
BUFFERS = "stof.buffers"  # of a function: names of the parameters that are states of the model's own
SAME_ELEMENTS = ("reshape", "expand_dims", "squeeze", "flatten")
FILLED = ("full", "full_like")
KEEPS_UNIFORM = (*SAME_ELEMENTS, "broadcast_to", "astype", "permute_dims")


class Bindings:
    """The bindings of one function.  Operators are named without "relax."."""

    def __init__(self, function: relax.Function):
        self.values = {}
        # Variable -> the variables that its value reads.  Everywhere here a variable is one Python object: a dict finds
        # another object of the same variable twenty times as slowly.
        self.reads: dict[relax.Var, tuple[relax.Var, ...]] = {}
        self.readers = defaultdict(list)  # variable -> the variables bound to expressions that read it
        self._uniform = {}  # constant -> its one number or None; weights are asked for again and again
        names = (function.attrs or {}).get(WEIGHTS, ())
        self.weights = {var for var in function.params if var.name in names}
        known = {var: var for var in function.params}
        for block in function.body.blocks:
            for binding in block.bindings:
                var = binding.var
                known[var] = var
                self.reads[var] = tuple(known.setdefault(x, x) for x in relax.analysis.free_vars(binding.value))
                if isinstance(binding, relax.VarBinding):
                    self.values[var] = binding.value
                for x in self.reads[var]:
                    self.readers[x].append(var)
        self.outputs = {known.get(x, x) for x in relax.analysis.free_vars(function.body.body)}

    def value(self, expr):
        """What `expr` is bound to, through aliases; `expr` itself for a parameter."""
        while isinstance(expr, relax.Var) and expr in self.values:
            expr = self.values[expr]
        return expr

    def is_weight(self, expr) -> bool:
        """Whether `expr` is a constant, or a parameter that stands for one."""
        value = self.value(expr)
        return isinstance(value, GenericConst) or value in self.weights

    def call(self, expr, *names) -> relax.Call | None:
        """The call of one of the operators `names` that `expr` is bound to, or None."""
        value = self.value(expr)
        return value if operator(value) in names else None

    def operands(self, call: relax.Call) -> list:
        """The operands of a call, with each tuple replaced by its fields."""
        return [x for arg in call.args for x in getattr(self.value(arg), "fields", [arg])]

    def same_elements(self, expr):
        """The operand if `expr` only renames its dimensions (a reshape, or a transpose of dimensions of size 1)."""
        call = self.call(expr, *SAME_ELEMENTS, "permute_dims")
        if call is None or static_shape(call) is None or static_shape(call.args[0]) is None:
            return None
        if operator(call) == "permute_dims":
            kept = [a for a in permutation(call) if shape_of(call.args[0])[a] != 1]
            return call.args[0] if kept == sorted(kept) else None
        return call.args[0]

    def depends_on(self, expr, value) -> bool:
        """Whether `value`, which a variable is bound to, is among all that `expr` is computed from."""
        return any(here.same_as(value) for here in self.values_before(expr))

    def values_before(self, expr) -> Iterator[relax.Expr]:
        """All that `expr` is computed from, itself first."""
        pending, seen = [expr], set()
        while pending:
            here = self.value(pending.pop())
            yield here
            for var in relax.analysis.free_vars(here):
                if var not in seen:
                    seen.add(var)
                    pending.append(var)

    def computed_from(self, variables: Iterable[relax.Var]) -> set[relax.Var]:
        """Some variables, and all that are computed from any of them."""
        pending = list(variables)
        found = set(pending)
        while pending:
            new = [var for var in self.readers.get(pending.pop(), ()) if var not in found]
            found.update(new)
            pending += new
        return found

    def scalar(self, expr) -> float | None:
        """The number that every element of `expr` is, or None."""
        value = self.value(expr)
        if isinstance(value, GenericConst):
            if value not in self._uniform:
                self._uniform[value] = _uniform(array_of(value))
            return self._uniform[value]
        inner = None
        if operator(value) in FILLED:
            inner = self.scalar(value.args[1])
        elif operator(value) in KEEPS_UNIFORM or operator(value) == "negative":
            inner = self.scalar(value.args[0])
        if inner is None:
            return None
        return in_dtype(-inner if operator(value) == "negative" else inner, dtype_of(value))


def in_dtype(number: float, dtype: str) -> float | None:
    """A number as a tensor of this dtype holds it: rounded, an integer, or inf beyond the largest; None for a NaN."""
    if math.isnan(number) or (math.isinf(number) and "float" not in dtype):
        return None
    with np.errstate(over="ignore"):
        return float(np.asarray(number).astype(np.dtype(dtype)))


def _uniform(array) -> float | None:
    """The number that every element of an array is, or None."""
    if array.size == 0:
        return None
    # Weights differ within their first numbers.  A single NaN is one number.
    if array.size > 1 and any((part != array.flat[0]).any() for part in (array.reshape(-1)[:64], array)):
        return None
    return float(array.flat[0])


def operator(expr) -> str:
    """The operator's name without "relax." if `expr` is a call of one, else ""."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
        return expr.op.name.removeprefix("relax.")
    return ""


def static_shape(expr) -> tuple[int, ...] | None:
    """The shape of a tensor, or None if a length is symbolic or `expr` is no tensor."""
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    lengths = list(shape.values)  # as a list: walking the shape itself takes three times as long
    return tuple(int(n) for n in lengths) if all(isinstance(n, tvm.tirx.IntImm) for n in lengths) else None


def shape_of(expr) -> tuple[int, ...]:
    """The shape of a tensor whose lengths are numbers; UnsupportedError where one is symbolic."""
    shape = static_shape(expr)
    if shape is None:
        raise UnsupportedError(f"{expr} has no shape of numbers; symbolic lengths are not supported")
    return shape


def dtype_of(expr) -> str:
    """The dtype of a tensor."""
    return str(expr.ty.dtype)


def permutation(call: relax.Call) -> list[int]:
    """The axes of a permute_dims call, written out."""
    rank = len(call.args[0].ty.shape)
    axes = call.attrs.axes
    return list(reversed(range(rank))) if axes is None else [int(a) % rank for a in axes]


def strip_reshapes(bindings: Bindings, expr, inner_dims: int = 2) -> relax.Expr:
    """`expr` before reshapes that kept its last `inner_dims` dimensions."""
    while (inner := bindings.same_elements(expr)) is not None:
        shape = shape_of(inner)
        if len(shape) < inner_dims or shape[-inner_dims:] != shape_of(expr)[-inner_dims:]:
            break
        expr = inner
    return expr


def element_count(expr) -> int | None:
    """Number of elements, None if a length is symbolic."""
    shape = static_shape(expr)
    return None if shape is None else math.prod(shape)
