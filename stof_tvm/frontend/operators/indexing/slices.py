"""Slices, diagonals, strides and windows at positions known in advance, read and written; no index is computed.

TVM's slice_scatter clamps its index to the wrong length, and reads out of bounds where TVM simplifies
(i % n + c) // d (docs/upstream/).  Here a strided slice is a column of a matrix, and anything without that form is read
through a constant index, which no simplification touches.
"""

import math

import numpy as np
import torch
from tvm import relax

from stof_tvm.frontend.operators.converters import cast, concat
from stof_tvm.frontend.operators.indexing.reading import part, permuted, reshaped, sizes
from stof_tvm.frontend.operators.indexing.writing import write_slices
from stof_tvm.frontend.states import WRITTEN
from tir_kernels.errors import UnsupportedError

op = relax.op
ELEMENTS = 1 << 24  # most elements of a constant index, 64 MiB


def slice_tensor(context, x, dim=0, start=None, end=None, step=1):
    start, end, step = slice(start, end, step).indices(sizes(x)[dim])
    if (start, step) == (0, 1) and end >= sizes(x)[dim]:
        return x
    return context.emit(op.strided_slice(x, [dim % len(sizes(x))], [start], [max(start, end)], [step]))


def slice_scatter(context, x, source, dim=0, start=None, end=None, step=1):
    """`out = x.clone(); out[start:end:step] = source` along dim.

    The dimension is a matrix of `step` columns, the slice a part of one column.  Elements at the end that fill no whole
    row are handled apart.
    """
    dim %= len(sizes(x))
    shape = sizes(x)
    length = shape[dim]
    start, end, step = slice(start, end, step).indices(length)
    count = len(range(start, end, step))
    source = cast(context, source, x.ty.dtype)
    if count == 0:
        return x
    if WRITTEN in context.node.meta and count < length:
        index = relax.const(np.arange(start, end, step), "int64")
        return write_slices(context, x, dim, index, source, "set", False)
    if step == 1 or count == 1:
        pieces = [(x, 0, start), (source, 0, count), (x, start + count, length)]
        return _joined(context, pieces, dim)
    first, column = divmod(start, step)
    rows = length // step
    whole = min(count, rows - first)  # slice elements in the matrix; the others lie behind it
    matrix = reshaped(context, part(context, x, dim, 0, rows * step), [*shape[:dim], rows, step, *shape[dim + 1 :]])
    old = part(context, matrix, dim + 1, column, column + 1)
    new = context.emit(op.expand_dims(source, dim + 1))
    new = _joined(context, [(old, 0, first), (new, 0, whole), (old, first + whole, rows)], dim)
    matrix = _joined(context, [(matrix, 0, column), (new, 0, 1), (matrix, column + 1, step)], dim + 1)
    flat = reshaped(context, matrix, [*shape[:dim], rows * step, *shape[dim + 1 :]])
    rest = part(context, x, dim, rows * step, length) if rows * step < length else None
    if rest is None:
        return flat
    if whole < count:
        left = sizes(rest)[dim]
        rest = _joined(context, [(rest, 0, column), (source, whole, count), (rest, column + 1, left)], dim)
    return concat(context, [flat, rest], dim)


def select_scatter(context, x, source, dim, index):
    index %= sizes(x)[dim]
    return slice_scatter(context, x, context.emit(op.expand_dims(source, dim)), dim, index, index + 1)


def _joined(context, pieces, axis):
    """The parts [start:end] of tensors along an axis, one after another; empty ones are left out."""
    kept = [part(context, x, axis, start, end) for x, start, end in pieces if start < end]
    return kept[0] if len(kept) == 1 else context.emit(op.concat(kept, axis))


def diagonal(context, x, offset=0, first=0, second=1):
    rank = len(sizes(x))
    axes = [first % rank, second % rank]
    others = [axis for axis in range(rank) if axis not in axes]
    front = permuted(context, x, axes + others)
    rows, columns = sizes(front)[:2]
    numbers = torch.arange(rows * columns).reshape(rows, columns).diagonal(offset)
    front = reshaped(context, front, [rows * columns, *sizes(front)[2:]])
    return permuted(context, at_constant(context, front, numbers, 0), [*range(1, rank - 1), 0])


def unfold(context, x, dim, size, step):
    if not sizes(x):
        return reshaped(context, x, context.shape)
    dim %= len(sizes(x))
    numbers = torch.arange(sizes(x)[dim]).unfold(0, size, step)
    windows = at_constant(context, x, numbers, dim)
    rank = len(sizes(windows))
    return permuted(context, windows, [axis for axis in range(rank) if axis != dim + 1] + [dim + 1])


def as_strided(context, x, *arguments):
    """Elements of a contiguous tensor that fills its storage; UnsupportedError for others."""
    _check_contiguous(context)
    return _elements(context, x, context.node.target(_numbers(x), *arguments))


def as_strided_scatter(context, x, source, *arguments):
    _check_contiguous(context)
    return diagonal_scatter(context, x, source, *arguments)


def diagonal_scatter(context, x, source, *arguments):
    """PyTorch scatters the numbers of the source's elements among those of x; the result is read by number."""
    source = cast(context, source, x.ty.dtype)
    count = math.prod(sizes(x))
    numbers = context.node.target(_numbers(x), _numbers(source) + count, *arguments)
    return _elements(context, concat(context, [reshaped(context, value, [-1]) for value in (x, source)]), numbers)


def _numbers(x):
    return torch.arange(math.prod(sizes(x))).reshape(sizes(x))


def _elements(context, x, numbers):
    """The elements with these numbers in x, flattened."""
    return at_constant(context, reshaped(context, x, [-1]), numbers, 0)


def at_constant(context, x, index, axis):
    """Slices of x along an axis at an index known at compile time."""
    if index.numel() > ELEMENTS:
        name = context.node.target
        raise UnsupportedError(f"{name} at {index.numel()} positions is more than {ELEMENTS}, which would be constants")
    index = relax.const(index.numpy().astype("int32"))
    return context.emit(op.take(x, index, axis=axis, mode="clip"))


def _check_contiguous(context):
    value = context.node.args[0].meta["val"]
    if not value.is_contiguous() or value.storage_offset() or value.untyped_storage().nbytes() != value.nbytes:
        raise UnsupportedError("as_strided of a view depends on where its elements lie in memory")


# -- elements in another order, windows, indices without an operand ------------------------------------------------


def flip(context, x, dims):
    """Reads a constant table of indices: TVM's simplifier gets n - 1 - i wrong once it is divided."""
    for dim in dims if sizes(x) else ():
        last = sizes(x)[dim] - 1
        order = relax.const(np.arange(last, -1, -1, dtype="int32"))
        x = context.emit(op.take(x, order, axis=dim % len(sizes(x)), mode="clip")) if last > 0 else x
    return x


def roll(context, x, shifts, dims=()):
    if not sizes(x):
        return x
    if not dims:
        return reshaped(context, roll(context, reshaped(context, x, [-1]), shifts, [0]), sizes(x))
    for shift, dim in zip(shifts, dims):
        dim %= len(sizes(x))
        length = sizes(x)[dim]
        start = -shift % length if length else 0
        x = _joined(context, [(x, start, length), (x, 0, start)], dim) if start else x
    return x


def constant_pad(context, x, pad, value=0):
    """`pad` holds (before, after) of the last dimension first.  TVM's converter refuses bools padded with numbers."""
    pairs = [(0, 0)] * (len(sizes(x)) - len(pad) // 2) + list(zip(pad[::2], pad[1::2]))[::-1]
    value = bool(value) if str(x.ty.dtype) == "bool" else value
    return context.emit(op.nn.pad(x, [n for pair in pairs for n in pair], "constant", float(value)))


def constant_result(context, *arguments):
    """PyTorch's result of an operator without tensors, as a constant: the indices of a triangle."""
    kwargs = {"dtype": context.node.meta["val"].dtype}
    return relax.const(context.node.target(*arguments[:3], **kwargs).numpy())


def empty(context, *_):
    """Zeros for memory that the model writes next: until then its contents are arbitrary in PyTorch, too."""
    return context.emit(op.broadcast_to(relax.const(0, context.dtype), context.shape))


SLICE_CONVERTERS = {
    "empty_like.default": empty,
    "empty_permuted.default": empty,
    "new_empty.default": empty,
    "slice.Tensor": slice_tensor,
    "slice_scatter.default": slice_scatter,
    "select_scatter.default": select_scatter,
    "diagonal.default": diagonal,
    "diagonal_scatter.default": diagonal_scatter,
    "constant_pad_nd.default": constant_pad,
    "as_strided.default": as_strided,
    "as_strided_scatter.default": as_strided_scatter,
    "unfold.default": unfold,
    "flip.default": flip,
    "roll.default": roll,
    "tril_indices.default": constant_result,
    "triu_indices.default": constant_result,
}
