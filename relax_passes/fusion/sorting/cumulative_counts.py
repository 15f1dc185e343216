"""CumulativeCounts: a running sum of how often numbers occur becomes the count of what is up to each number.

    cumsum(sum(c == x, axis of x))      →      sum(first <= x & x <= c, axis of x)        c = first, first + 1, …

So the ends of groups, as mixtures of experts count them, are one sum instead of a sum and a scan.  Preconditions:
"main" is one dataflow block; after `FoldClosedExpressions`.  A running sum is rewritten if

- c is a constant of integers, which grows by one along the dimension of the running sum and is the same along others,
  and x does not vary along this dimension;
- all counts are whole numbers of the dtypes between the comparison and the result: integers of 32 bits at least, or
  float32 for up to 2^24 elements, or float64.
"""

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.ir.rebuild import rebuild

op = relax.op
COUNTS = {"int32": 2**31 - 1, "int64": 2**63 - 1, "float32": 1 << 24, "float64": 1 << 53}  # that a dtype holds exactly


@tvm.transform.module_pass(opt_level=0, name="CumulativeCounts")
class CumulativeCounts:
    """Rewrite the running sums of counts in "main"."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        found = {var: match for var in bindings.values if (match := _match(bindings, var)) is not None}

        def replace(builder, var, new):
            return _emit(builder, found[var], new, dtype_of(var)) if var in found else None

        return rebuild(mod, replace) if found else mod


@dataclass(frozen=True)
class _Counts:
    """Elements of `x` that are compared with `numbers`, a constant that begins with `first`; the dimension of x."""

    x: relax.Expr
    numbers: GenericConst
    first: int
    axis: int


def _match(bindings: Bindings, var) -> _Counts | None:
    """The counts whose running sum `var` is."""
    scan = bindings.call(var, "cumsum")
    if scan is None or not bindings.values[var].same_as(scan) or bool(scan.attrs.exclusive):
        return None
    counts, dtypes = scan.args[0], [dtype_of(var)]
    while (cast := bindings.call(counts, "astype")) is not None:
        dtypes.append(dtype_of(counts))
        counts = cast.args[0]
    total = bindings.call(counts, "sum")
    if total is None or total.attrs.axis is None or len(total.attrs.axis) != 1 or bool(total.attrs.keepdims):
        return None
    ones = bindings.call(total.args[0], "astype")
    same = None if ones is None else bindings.call(ones.args[0], "equal")
    if same is None or (shape := static_shape(same)) is None:
        return None
    axis = int(total.attrs.axis[0]) % len(shape)
    rank = len(shape) - 1
    if scan.attrs.axis is None and rank != 1:
        return None
    along = int(scan.attrs.axis or 0) % rank
    along += along >= axis  # the dimension of the running sum, before x's is summed
    dtypes += [dtype_of(counts), dtype_of(ones)]
    if not all(dtype in COUNTS and shape[axis] <= COUNTS[dtype] for dtype in dtypes):
        return None
    for numbers, x in (tuple(same.args), tuple(reversed(same.args))):
        first = _first_number(bindings.value(numbers), along - len(shape), shape[along])
        if first is not None and _is_one_along(x, along - len(shape)):
            return _Counts(x, bindings.value(numbers), first, axis)
    return None


def _first_number(constant, axis: int, n: int) -> int | None:
    """The first of the n integers that a constant has along a dimension, counted from the last one; else None."""
    if not isinstance(constant, GenericConst) or dtype_of(constant) not in ("int32", "int64"):
        return None
    array = constant.value.numpy()
    if array.ndim < -axis or array.size != n or array.shape[axis] != n:
        return None
    values = array.ravel()
    return int(values[0]) if (values == values[0] + np.arange(n)).all() else None


def _is_one_along(x, axis: int) -> bool:
    """Whether a tensor is the same along a dimension, counted from the last one, because it is broadcast."""
    shape = shape_of(x)
    return len(shape) < -axis or shape[axis] == 1


def _emit(builder, counts: _Counts, new, dtype: str):
    x, emit, kind = new(counts.x), builder.emit, dtype_of(counts.x)
    up_to = emit(op.less_equal(x, counts.numbers))
    inside = emit(op.logical_and(up_to, emit(op.greater_equal(x, relax.const(counts.first, kind)))))
    total = emit(op.sum(emit(op.astype(inside, "int32")), [counts.axis]))
    return total if dtype == "int32" else op.astype(total, dtype)
