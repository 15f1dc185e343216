"""Operands of attention that are views of another tensor: reshapes, transposes, splits and slices of a projection.

Each dimension of a view is a list of factors (extent, stride), outermost first, because a reshape may join dimensions
that do not lie side by side and a later one part them again, as nn.MultiheadAttention does with batch and heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax, tirx
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, shape_of, static_shape
from tir_kernels.attention.problem import View

MAX_SIZE = 2**31 - 1  # elements that 32-bit indices reach


@dataclass(frozen=True)
class Strided:
    """A view: the factors of each dimension, and the position of its first element in the base."""

    dims: list[list[tuple[int, int]]]
    offset: int = 0

    @staticmethod
    def contiguous(shape) -> "Strided":
        """A whole contiguous buffer of this shape."""
        return Strided([_joined([(n, math.prod(shape[i + 1 :]))]) for i, n in enumerate(shape)])

    def reshape(self, shape) -> "Strided | None":
        """The same elements in another shape; None where strides cannot express it."""
        factors = [f for dim in self.dims for f in dim]
        dims = []
        for extent in shape:
            taken, missing = [], extent
            while missing > 1:
                if not factors:
                    return None
                n, stride = factors.pop(0)
                if n % missing == 0:
                    inner = n // missing
                    factors.insert(0, (inner, stride))
                    n, stride = missing, inner * stride
                elif missing % n:
                    return None
                taken.append((n, stride))
                missing //= n
            dims.append(_joined(taken))
        return Strided(dims, self.offset)

    def permute(self, axes) -> "Strided":
        """The dimensions in another order."""
        return Strided([self.dims[a] for a in axes], self.offset)

    def narrow(self, axis: int, start: int, length: int, step: int = 1) -> "Strided | None":
        """`length` elements of a dimension, `step` apart."""
        (_, stride), *rest = self.dims[axis] or [(1, 0)]
        inner = math.prod(n for n, _ in rest)
        if start % inner or length % inner or (rest and step > 1):
            return None
        factors = _joined([(length // inner, stride * step), *rest])
        return Strided([*self.dims[:axis], factors, *self.dims[axis + 1 :]], self.offset + start // inner * stride)

    def drop(self, axis: int) -> "Strided":
        """The view without a dimension, whose extent is 1."""
        return Strided([*self.dims[:axis], *self.dims[axis + 1 :]], self.offset)

    def strides(self) -> list[int] | None:
        """The stride of each dimension, 0 for extent 1; None where a dimension has no single one."""
        if any(len(dim) > 1 for dim in self.dims):
            return None
        return [dim[0][1] if dim else 0 for dim in self.dims]


def _joined(factors):
    """The factors without those of 1, and with neighbours that are contiguous in memory merged."""
    joined = []
    for n, stride in factors:
        if joined and joined[-1][1] == n * stride:
            joined[-1] = (joined[-1][0] * n, stride)
        elif n > 1:
            joined.append((n, stride))
    return joined


def find_view(bindings: Bindings, operand: relax.Expr, multiple: int) -> tuple[relax.Expr, View] | None:
    """(base, view) such that `operand` (B, H, S, D) is `view` of the elements of `base`, the farthest such tensor.

    Offset and strides are multiples of `multiple`.  None where `operand` is no view of any other tensor.
    """
    chain = []  # (source, function from a view of the source to a view of the expression that reads it)
    expr = operand
    while (step := _step(bindings, expr)) is not None and static_shape(step[0]) is not None:
        chain.append(step)
        expr = step[0]
    for depth in range(len(chain), 0, -1):
        base = chain[depth - 1][0]
        view: Strided | None = Strided.contiguous(static_shape(base))
        for _, apply in reversed(chain[:depth]):
            view = view and apply(view)
        if view is None or (strides := view.strides()) is None:
            continue
        size = math.prod(shape_of(base))
        if size > MAX_SIZE or strides[3] > 1 or (strides[3] == 0 and shape_of(operand)[3] > 1):
            continue
        found = View(size, view.offset, *strides[:3])
        if all(n % multiple == 0 for n in found[1:]):
            return base, found
    return None


def _step(bindings: Bindings, expr) -> tuple[relax.Expr, Callable] | None:
    """(the tensor that `expr` is a view of, the function that turns a view of it into one of `expr`), or None."""
    value = bindings.value(expr)
    if isinstance(value, relax.TupleGetItem):
        return _split(bindings, value)
    name = operator(value)
    if name in SAME_ELEMENTS:
        return value.args[0], lambda view: view.reshape(static_shape(value))
    if name == "permute_dims":
        return value.args[0], lambda view: view.permute(permutation(value))
    if name == "strided_slice":
        return _strided_slice(value)
    if name == "take":
        return _take(value)
    return None


def _split(bindings, item):
    call = bindings.call(item.tuple_value, "split")
    shape = None if call is None else static_shape(call.args[0])
    if shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    extents = [int(field.shape[axis]) for field in call.ty.fields]
    return call.args[0], lambda view: view.narrow(axis, sum(extents[: item.index]), extents[item.index])


def _strided_slice(call):
    bounds = slice_bounds(call)
    if bounds is None:
        return None

    def apply(view):
        for axis, (start, stop, step) in bounds.items():
            view = view and view.narrow(axis, start, max(0, -(-(stop - start) // step)), step)
        return view

    return call.args[0], apply


def slice_bounds(call: relax.Call) -> dict[int, tuple[int, int, int]] | None:
    """(start, stop, step) along each sliced dimension; None if a bound is not known or a step is less than 1."""
    shape = static_shape(call.args[0])
    numbers = [known for argument in call.args[1:] if (known := _integers(argument)) is not None]
    if shape is None or len(numbers) < max(3, len(call.args) - 1):
        return None
    axes, begin, end, *rest = numbers
    steps = rest[0] if rest else [1] * len(axes)
    if min(steps, default=1) < 1:
        return None
    slices = zip(axes, begin, end, steps)
    return {a % len(shape): slice(first, last, step).indices(shape[a]) for a, first, last, step in slices}


def _take(call):
    """`_step` of a take whose index is one constant number; None for any other."""
    source, index = call.args
    shape, axis = static_shape(source), call.attrs.axis
    if not isinstance(index, GenericConst) or index.value.numpy().ndim or shape is None:
        return None
    if axis is None and len(shape) != 1:
        return None
    axis = int(axis or 0) % len(shape)
    position = int(index.value.numpy())
    if not 0 <= position < shape[axis]:
        return None

    def apply(view):
        one = view.narrow(axis, position, 1)
        return one and one.drop(axis)

    return source, apply


def _integers(argument) -> list[int] | None:
    fields = argument.fields if isinstance(argument, relax.Tuple) else None
    values = None if fields is None else [getattr(field, "value", field) for field in fields]
    if values is None or not all(isinstance(v, (int, tirx.IntImm)) for v in values):
        return None
    return [int(v) for v in values]
