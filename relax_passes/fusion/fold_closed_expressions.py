"""Fold closed expressions: those that depend only on constants are computed at compile time.

Preconditions: "main" is one dataflow block; before `PartitionSegments`.  Tables of positions and of rotary angles
become constants.  Views of constants stay views: a transposed weight is read in place, a broadcast where it is needed.
Places that nothing but gathers reads become int32.  Results above `MAX_BYTES` are left to be computed by the engine.
"""

import math

import numpy as np
import tvm
from tvm import relax

from relax_passes.fusion.operators import VIEWS
from relax_passes.ir.bindings import Bindings, dtype_of, operator, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from relax_passes.legalizations.closed_values import closed_values

MAX_BYTES = 1 << 24


@tvm.transform.module_pass(opt_level=0, name="FoldClosedExpressions")
class FoldClosedExpressions:
    """Replace the closed expressions of "main" that are read at run time by their values."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        closed = ClosedExpressions(bindings)
        needed = [var for var in _read_at_run_time(bindings, closed.closed_vars) if _is_small(var)]
        values = dict(zip(needed, closed_values(bindings, needed)))
        if not values:
            return mod

        places = _places(bindings)

        def replace(_builder, var, _new):
            if var not in values:
                return None
            narrow = var in places and _fits_int32(values[var])
            return relax.const(values[var], "int32" if narrow else dtype_of(var))

        return rebuild(mod, replace)


def _read_at_run_time(bindings: Bindings, closed: set) -> list:
    """The closed variables that run-time variables read, or that the function returns, directly or through views."""
    readers = [var for var in bindings.values if var not in closed]
    pending = [*bindings.outputs, *(var for reader in readers for var in bindings.reads[reader])]
    found = {}
    while pending:
        var = pending.pop()
        if var not in closed:
            continue
        value = bindings.values[var]
        if isinstance(value, relax.Call) and operator(value) not in VIEWS:
            found[var] = None
        else:
            pending += bindings.reads[var]
    return list(found)


def _fits_int32(places: np.ndarray) -> bool:
    limits = np.iinfo("int32")
    return bool(((limits.min <= places) & (places <= limits.max)).all())


def _places(bindings: Bindings) -> set:
    """The variables of int64 whose elements nothing reads but gathers, as places, directly or through views."""
    found: set = set()
    for var in reversed(list(bindings.values)):
        if static_shape(var) is None or dtype_of(var) != "int64" or var in bindings.outputs:
            continue
        readers = [(reader, bindings.values[reader]) for reader in bindings.readers[var]]
        if readers and all(_reads_places(x, var) or _is_read_as_places(reader, x, found) for reader, x in readers):
            found.add(var)
    return found


def _reads_places(value, var) -> bool:
    """Whether a value gathers by `var`, and does not gather from it."""
    return operator(value) == "gather_elements" and value.args[1].same_as(var) and not value.args[0].same_as(var)


def _is_read_as_places(reader, value, found: set) -> bool:
    return reader in found and (isinstance(value, relax.Var) or operator(value) in VIEWS - {"split"})


def _is_small(var) -> bool:
    shape = static_shape(var)
    return shape is not None and math.prod(shape) * tvm.DataType(dtype_of(var)).bits // 8 <= MAX_BYTES
