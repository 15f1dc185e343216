"""Reading at positions that other tensors give: index, gather, take, embedding.

PyTorch raises for an index outside a tensor, which an engine cannot.  TVM reads whatever lies there.  Here such an
element comes out as `poison` of its dtype: NaN, the smallest integer, False.
"""

import math

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.converters import cast, constant
from tir_kernels.errors import UnsupportedError

op = relax.op


def embedding(context, weight, indices, *_):
    """An index outside the table gives a row of NaN; TVM's default mode reads whatever lies there."""
    flat = context.emit(op.reshape(cast(context, indices, "int32"), [-1]))
    rows = context.emit(op.take(weight, flat, axis=0, mode="nan"))
    return context.emit(op.reshape(rows, context.shape))


def select(context, x, dim, index):
    size = sizes(x)[dim]
    # The index is in range; without a mode TVM warns that it might not be.
    return context.emit(op.take(x, relax.const(index % size, "int64"), axis=dim, mode="clip"))


def index_tensor(context, x, indices):
    """`x[i, :, j]` with integer tensors i, j, None standing for ":"."""
    axes, index, broadcast = flat_index(context, x, indices)
    if len(axes) == 1:
        return read(context, x, index, axes[0])
    shape = sizes(x)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    front = permuted(context, x, axes + others)
    front = reshaped(context, front, [-1, *(shape[axis] for axis in others)])
    picked = reshaped(context, read(context, front, index, 0), [*broadcast, *(shape[axis] for axis in others)])
    return permuted(context, picked, inverse(indexed_first(axes, len(broadcast), len(others))))


def index_select(context, x, dim, index):
    if not sizes(x):
        return reshaped(context, x, context.shape)
    index = reshaped(context, index, [-1])
    return read(context, x, index, dim % len(sizes(x)), wraps=False)


def gather(context, x, dim, index, *_):
    """`out[i, j, k] = x[i, index[i, j, k], k]` for dim 1; the other dimensions of x may be longer than index's."""
    shape = sizes(index)
    if 0 in shape:
        return context.emit(op.zeros(shape, x.ty.dtype))
    if not shape or not sizes(x):
        x, index = (reshaped(context, value, [-1]) for value in (x, index))
        return reshaped(context, read(context, x, index, 0, wraps=False), shape)
    dim %= len(shape)
    for axis, length in enumerate(shape):
        if axis != dim:
            x = part(context, x, axis, 0, length)
    n = sizes(x)[dim]
    inside = is_inside(context, index, n, wraps=False)
    nearest = clipped(context, index, n)
    values = context.emit(op.gather_elements(x, cast(context, nearest, "int64"), dim))
    return context.emit(op.where(inside, values, constant(poison(x.ty.dtype), x)))


def take(context, x, index):
    flat = reshaped(context, x, [-1])
    return reshaped(context, read(context, flat, reshaped(context, index, [-1]), 0), context.shape)


def take_along_dim(context, x, index, dim=None):
    if dim is None:
        return gather(context, reshaped(context, x, [-1]), 0, reshaped(context, index, [-1]))
    dim %= len(sizes(x))
    n = sizes(x)[dim]
    common = np.broadcast_shapes(*([m for a, m in enumerate(sizes(value)) if a != dim] for value in (x, index)))
    shape = lambda length: [*common[:dim], length, *common[dim:]]
    x = broadcast_to(context, x, shape(n))
    index = broadcast_to(context, index, shape(sizes(index)[dim]))
    return gather(context, x, dim, wrapped(context, index, n))


# -- steps -------------------------------------------------------------------------------------------------------------


def read(context, x, index, axis, wraps=True) -> relax.Expr:
    """Slices of `x` along `axis` at `index`, a tensor of any shape; if `wraps`, negative ones count from the end."""
    n = sizes(x)[axis]
    index = wrapped(context, index, n) if wraps else index
    if "float" in str(x.ty.dtype):
        return context.emit(op.take(x, index, axis=axis, mode="nan"))
    values = context.emit(op.take(x, index, axis=axis, mode="clip"))
    inside = is_inside(context, index, n, wraps=False)
    shape = [1] * axis + sizes(index) + [1] * (len(sizes(x)) - axis - 1)
    return context.emit(op.where(reshaped(context, inside, shape), values, constant(poison(x.ty.dtype), x)))


def flat_index(context, x, indices):
    """(axes, index, shape) of an index by several tensors: the axes that they index, one index into these axes merged,
    and the shape to which the tensors broadcast.

    A single tensor is the index itself and may count from the end.  Several give a 1-dimensional index without negative
    elements; where a tensor is outside its axis, the index is the size of the merged axes.
    """
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(str(index.ty.dtype) in ("bool", "uint8") for _, index in given):
        raise UnsupportedError("indexing by a boolean tensor has a shape that depends on its values")
    axes = [axis for axis, _ in given]
    if len(given) == 1:
        return axes, given[0][1], sizes(given[0][1])
    shape = list(np.broadcast_shapes(*(sizes(index) for _, index in given)))
    flat = inside = None
    for axis, index in given:
        n = sizes(x)[axis]
        index = cast(context, index, "int64")
        within = is_inside(context, index, n, wraps=True)
        index = wrapped(context, index, n)
        if flat is not None:
            index = context.emit(op.add(context.emit(op.multiply(flat, constant(n, flat))), index))
            within = context.emit(op.logical_and(inside, within))
        flat, inside = index, within
    total = math.prod(sizes(x)[axis] for axis in axes)
    flat = context.emit(op.where(inside, flat, constant(total, flat)))
    return axes, reshaped(context, broadcast_to(context, flat, shape), [-1]), shape


def indexed_first(axes, broadcast, others) -> list[int]:
    """The permutation that moves the dimensions of the indices to the front of x[indices].

    PyTorch leaves these dimensions where the indexed axes were if those axes are neighbours.  `index_put` applies the
    permutation, `index_tensor` its inverse.
    """
    neighbours = axes[-1] - axes[0] == len(axes) - 1
    before = axes[0] if neighbours else 0
    rest = [n for n in range(broadcast + others) if not before <= n < before + broadcast]
    return [*range(before, before + broadcast), *rest]


def inverse(order) -> list[int]:
    return [order.index(n) for n in range(len(order))]


def wrapped(context, index, n):
    from_end = context.emit(op.add(index, constant(n, index)))
    return context.emit(op.where(context.emit(op.less(index, constant(0, index))), from_end, index))


def clipped(context, index, n):
    index = context.emit(op.minimum(index, constant(n - 1, index)))
    return context.emit(op.maximum(index, constant(0, index)))


def is_inside(context, index, n, wraps):
    above = context.emit(op.greater_equal(index, constant(-n if wraps else 0, index)))
    return context.emit(op.logical_and(above, context.emit(op.less(index, constant(n, index)))))


def poison(dtype):
    """The value that is read for an element outside a tensor."""
    if "float" in str(dtype):
        return math.nan
    return False if str(dtype) == "bool" else int(np.iinfo(str(dtype)).min)


def sizes(x) -> list[int]:
    return [int(n) for n in x.ty.shape]


def reshaped(context, x, shape):
    shape = list(shape)
    if -1 in shape:
        known = -math.prod(shape)
        shape[shape.index(-1)] = math.prod(sizes(x)) // known if known else 0
    return x if sizes(x) == shape else context.emit(op.reshape(x, shape))


def permuted(context, x, axes):
    return x if list(axes) == list(range(len(axes))) else context.emit(op.permute_dims(x, axes))


def broadcast_to(context, x, shape):
    return x if sizes(x) == list(shape) else context.emit(op.broadcast_to(x, list(shape)))


def part(context, x, axis, start, end):
    """x[start:end] along an axis."""
    if (start, end) == (0, sizes(x)[axis]):
        return x
    return context.emit(op.strided_slice(x, [axis], [start], [end], [1]))


INDEXING_CONVERTERS = {
    "embedding.default": embedding,
    "select.int": select,
    "index.Tensor": index_tensor,
    "index_select.default": index_select,
    "gather.default": gather,
    "take.default": take,
    "take_along_dim.default": take_along_dim,
}
