"""PlacesInside: places that are known to lie inside a tensor are read without a question.

    where(i < 0, i + n, i)       →  i                       where i is never negative
    take(x, i, mode="nan")       →  take(x, i, mode="clip")     where i is always a place of x

PyTorch's negative places count from the end, and places outside a tensor give NaN here.  The order of a sort and its
inverse need neither.  Preconditions: "main" is one dataflow block; after `SortsToKernels`, whose operators give orders.
"""

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, operator, shape_of
from relax_passes.ir.operators.sorting import SORTING, problem_of_sorting
from relax_passes.ir.rebuild import rebuild

INTEGERS = ("int32", "int64")
REARRANGED = (*SAME_ELEMENTS, "permute_dims", "broadcast_to", "strided_slice")
Range = tuple[int, int]  # the least and the largest number


@tvm.transform.module_pass(opt_level=0, name="PlacesInside")
class PlacesInside:
    """Simplify reads at places of "main" whose range is known."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        if not any(operator(value) in SORTING for value in bindings.values.values()):
            return mod
        ranges = _Ranges(bindings)

        def replace(_builder, var, new):
            if (place := _wrapped(bindings, var)) is not None and (known := ranges.of(place)) and known[0] >= 0:
                return new(place)
            take = bindings.call(var, "take")
            if take is None or not bindings.values[var].same_as(take) or str(take.attrs.mode) != "nan":
                return None
            x, index = take.args
            axis, known = None if take.attrs.axis is None else int(take.attrs.axis), ranges.of(index)
            if known is None or (axis is None and len(shape_of(x)) != 1):
                return None
            inside = 0 <= known[0] and known[1] < shape_of(x)[axis or 0]
            return relax.op.take(new(x), new(index), axis=axis, mode="clip") if inside else None

        return rebuild(mod, replace)


def _wrapped(bindings: Bindings, expr):
    """i of where(i < 0, …, i), or None."""
    choice = bindings.call(expr, "where")
    below = None if choice is None else bindings.call(choice.args[0], "less")
    if choice is None or below is None or bindings.scalar(below.args[1]) != 0 or dtype_of(expr) not in INTEGERS:
        return None
    same = bindings.value(below.args[0]).same_as(bindings.value(choice.args[2]))
    return choice.args[2] if same and shape_of(choice.args[2]) == shape_of(expr) else None


class _Ranges:
    """The least and the largest number that integers of a function can be, where that is known."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.known: dict = {}

    def of(self, expr) -> Range | None:
        """The range of an expression, or None."""
        if isinstance(expr, relax.Var):
            if expr not in self.known:
                self.known[expr] = None
                self.known[expr] = self._found(self.bindings.value(expr))
            return self.known[expr]
        return self._found(expr)

    def _found(self, value) -> Range | None:
        if isinstance(value, relax.TupleGetItem):
            call = self.bindings.value(value.tuple_value)
            is_order = operator(call) in SORTING and value.index > 0
            return self._places(call) if is_order else None
        if not hasattr(value.ty, "dtype") or dtype_of(value) not in INTEGERS:
            return None
        if isinstance(value, GenericConst):
            array = value.value.numpy()
            return (int(array.min()), int(array.max())) if array.size else None
        name = operator(value)
        if name in REARRANGED:
            return self.of(value.args[0])
        if name == "where":
            place = _wrapped(self.bindings, value)
            known = None if place is None else self.of(place)
            return known if known is not None and known[0] >= 0 else None
        if name in ("floor_divide", "minimum", "maximum"):
            return self._combined(name, *(self.of(argument) for argument in value.args))
        known = self.of(value.args[0]) if name == "astype" else None
        is_held = known is not None and all(abs(n) < 1 << 31 for n in known)
        return known if is_held or known is not None and dtype_of(value) == "int64" else None

    @staticmethod
    def _combined(name: str, a: Range | None, b: Range | None) -> Range | None:
        if a is None or b is None:
            return None
        if name == "floor_divide":
            return (a[0] // b[1], a[1] // b[0]) if a[0] >= 0 and b[0] > 0 else None
        choose = min if name == "minimum" else max
        return choose(a[0], b[0]), choose(a[1], b[1])

    def _places(self, call) -> Range | None:
        """The places of the rows that were sorted: merged runs keep the positions that were given."""
        while operator(call) == "merge_runs":
            order = self.bindings.value(call.args[1])
            if not isinstance(order, relax.TupleGetItem) or order.index != 1:
                return None
            call = self.bindings.value(order.tuple_value)
        return (0, problem_of_sorting(call).n - 1) if operator(call) == "sort_runs" else None
