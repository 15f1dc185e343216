"""Writing at positions that other tensors give: index_put, index_copy, index_add, scatter and their kin.

Among several writes to one element the last wins; sums and products take all of them.  An index outside the tensor, for
which PyTorch raises, writes `poison` at the nearest position instead (indexing/reading.py).
"""

import math

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.converters import HALF, cast, constant
from stof_tvm.frontend.operators.indexing.permutations import is_permutation, write_permuted
from stof_tvm.frontend.operators.indexing.reading import (
    broadcast_to,
    clipped,
    flat_index,
    indexed_first,
    inverse,
    is_inside,
    part,
    permuted,
    poison,
    read,
    reshaped,
    sizes,
    wrapped,
)
from stof_tvm.frontend.operators.indexing.rising import is_rising
from stof_tvm.frontend.states import WRITTEN
from tir_kernels.errors import UnsupportedError
from tir_kernels.scatter import scatter as scatter_kernel

op = relax.op
COMPARED = 1 << 26  # most pairs (position, update) that are all compared to find the last writers
REDUCTIONS = {"sum": "add", "add": "add", "mean": "add", "prod": "multiply", "multiply": "multiply"}
REDUCTIONS |= {"amax": "amax", "amin": "amin"}


# -- whole slices at a list of indices -----------------------------------------------------------------------------


def index_put(context, x, indices, values, accumulate=False, *_):
    given = [index for index in indices if index is not None]
    values = cast(context, values, x.ty.dtype)
    if any(str(index.ty.dtype) in ("bool", "uint8") for index in given):
        return _put_at_mask(context, x, indices, values, accumulate)
    axes, index, broadcast = flat_index(context, x, indices)
    shape = sizes(x)
    if _writes_state(context) and len(axes) == 1 and not accumulate:
        (axis,) = axes
        values = broadcast_to(context, values, [*shape[:axis], *broadcast, *shape[axis + 1 :]])
        rising = is_rising(context.node.args[1][axis], shape[axis])
        return write_slices(context, x, axis, reshaped(context, index, [-1]), values, "set", True, rising)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    rest = [shape[axis] for axis in others]
    order = indexed_first(axes, len(broadcast), len(others))
    picked = [(broadcast + rest)[n] for n in inverse(order)]  # the shape of x[indices]
    values = permuted(context, broadcast_to(context, values, picked), order)
    rows = reshaped(context, values, [math.prod(broadcast), *rest])
    front = permuted(context, x, axes + others)
    moved = sizes(front)
    front = reshaped(context, front, [math.prod(shape[axis] for axis in axes), *rest])
    if (
        not accumulate
        and len(axes) == len(given) == 1
        and is_permutation(context.node.args[1][axes[0]], shape[axes[0]])
    ):
        written = write_permuted(context, front, index, rows)
        return permuted(context, reshaped(context, written, moved), inverse(axes + others))
    reduction = "add" if accumulate else "set"
    written = write_slices(context, front, 0, reshaped(context, index, [-1]), rows, reduction, len(axes) == 1)
    return permuted(context, reshaped(context, written, moved), inverse(axes + others))


def _put_at_mask(context, x, indices, values, accumulate):
    """`x[mask] = values`: a where() if every element gets the same, else the values in the mask's order."""
    mask = indices[-1]
    if len(indices) > 1 and (any(index is not None for index in indices[:-1]) or len(sizes(values)) > 0):
        raise UnsupportedError("a boolean index together with other indices is not supported")
    rest = sizes(x)[len(indices) - 1 + len(sizes(mask)) :]
    mask = cast(context, mask, "bool")
    flags = reshaped(context, mask, [1] * (len(indices) - 1) + sizes(mask) + [1] * len(rest))
    if len(sizes(values)) > len(rest):
        if sizes(values)[0] != 1:
            rows = broadcast_to(context, values, [sizes(values)[0], *rest])
            values = _in_order(context, mask, rows, sizes(mask) + rest)
        else:
            values = reshaped(context, values, sizes(values)[1:])
    if accumulate:
        values = context.emit((op.logical_or if str(x.ty.dtype) == "bool" else op.add)(x, values))
    return context.emit(op.where(flags, values, x))


def masked_scatter(context, x, mask, source):
    shape = context.shape
    mask = broadcast_to(context, cast(context, mask, "bool"), shape)
    source = reshaped(context, cast(context, source, context.dtype), [-1])
    values = _in_order(context, mask, source, shape)
    return context.emit(op.where(mask, values, broadcast_to(context, x, shape)))


def _in_order(context, mask, rows, shape):
    """The first row at the first true element of the mask, the second at the second, and so on."""
    flags = context.emit(op.astype(reshaped(context, mask, [-1]), "int32"))
    before = context.emit(op.subtract(context.emit(op.cumsum(flags, 0)), relax.const(1, "int32")))
    return reshaped(context, read(context, rows, before, 0, wraps=False), shape)


def index_copy(context, x, dim, index, source):
    return _index_write(context, x, dim, index, source, "set")


def index_add(context, x, dim, index, source, alpha=1):
    if alpha != 1:
        source = context.emit(op.multiply(source, constant(alpha, source)))
    return _index_write(context, x, dim, index, source, "add")


def index_fill(context, x, dim, index, value):
    value = value if isinstance(value, relax.Expr) else constant(value, x)
    shape = sizes(x) or [1]
    shape[dim] = math.prod(sizes(index))
    source = broadcast_to(context, cast(context, value, x.ty.dtype), shape)
    return _index_write(context, x, dim, index, source, "set", wraps=True)


def index_reduce(context, x, dim, index, source, reduce, include_self=True):
    if not sizes(x):
        x, source = (reshaped(context, value, [1]) for value in (x, source))
        return reshaped(context, index_reduce(context, x, 0, index, source, reduce, include_self), [])
    shape = sizes(source)
    dim %= len(shape)
    index = reshaped(context, index, [1] * dim + [-1] + [1] * (len(shape) - dim - 1))
    index = broadcast_to(context, index, shape)
    return scatter_reduce(context, x, dim, index, source, reduce, include_self)


def _index_write(context, x, dim, index, source, reduction, wraps=False):
    shape = sizes(x)
    if not shape:
        x, source = (reshaped(context, value, [1]) for value in (x, source))
    index = reshaped(context, index, [-1])
    dim %= len(sizes(x))
    rising = _writes_state(context) and is_rising(context.node.args[2], sizes(x)[dim])
    return reshaped(context, write_slices(context, x, dim, index, source, reduction, wraps, rising), shape)


def put(context, x, index, source, accumulate=False):
    flat = (reshaped(context, value, [-1]) for value in (x, index, source))
    x, index, source = flat
    reduction = "add" if accumulate else "set"
    return reshaped(context, write_slices(context, x, 0, index, source, reduction, True), context.shape)


def write_slices(context, x, axis, index, source, reduction, wraps, rising=False):
    """`x` with slices along `axis` at `index` (one dimension) set to, or increased by, those of `source`.

    `rising` says what `is_rising` does of the index.
    """
    n, updates = sizes(x)[axis], sizes(index)[0]
    if updates == 0 or n == 0:
        return x
    around = [math.prod(sizes(x)[:axis]), math.prod(sizes(x)[axis + 1 :])]
    # A state is written by a kernel, for it can do so in place; other tensors are read where they are not written.
    if reduction != "set" or _writes_state(context):
        x3 = reshaped(context, x, [around[0], n, around[1]])
        source = reshaped(context, source, [around[0], updates, around[1]])
        index = reshaped(context, index, [1, -1, 1])
        return reshaped(context, _kernel(context, x3, index, source, reduction, wraps, rising), sizes(x))
    index = wrapped(context, index, n) if wraps else index
    writer = _last_writer(context, index, n)
    is_written = context.emit(op.greater_equal(writer, relax.const(0, "int32")))
    is_written = reshaped(context, is_written, [n] + [1] * (len(sizes(x)) - axis - 1))
    return context.emit(op.where(is_written, read(context, source, writer, axis, wraps=False), x))


def _writes_state(context) -> bool:
    return WRITTEN in context.node.meta


def _last_writer(context, index, n):
    """For each position the last update that writes it: -1 for none, `updates` if its index is outside."""
    updates = sizes(index)[0]
    numbers = relax.const(np.arange(updates), "int32")
    inside = is_inside(context, index, n, wraps=False)
    numbers = context.emit(op.where(inside, numbers, relax.const(updates, "int32")))
    index = clipped(context, index, n)
    if n * updates > COMPARED:
        nobody = broadcast_to(context, relax.const(-1, "int32"), [1, n, 1])
        index, numbers = (reshaped(context, value, [1, -1, 1]) for value in (index, numbers))
        return reshaped(context, _kernel(context, nobody, index, numbers, "amax", False), [n])
    positions = relax.const(np.arange(n)[:, None], str(index.ty.dtype))
    writes = context.emit(op.equal(positions, index))
    return context.emit(op.max(context.emit(op.where(writes, numbers, relax.const(-1, "int32"))), 1))


# -- single elements: an index for each ----------------------------------------------------------------------------


def scatter(context, x, dim, index, source, reduce=None):
    """aten.scatter with a tensor or a number, and with `reduce`, "add" or "multiply"."""
    return _scattered(context, x, dim, index, source, REDUCTIONS[reduce] if reduce else "set")


def scatter_add(context, x, dim, index, source):
    return _scattered(context, x, dim, index, source, "add")


def scatter_reduce(context, x, dim, index, source, reduce, include_self=True):
    dtype = str(x.ty.dtype)
    reduction = REDUCTIONS[reduce]
    if not include_self:
        touched = context.emit(op.zeros(sizes(x), "int32"))
        touched = context.emit(op.astype(_scattered(context, touched, dim, index, 1, "set"), "bool"))
        x = context.emit(op.where(touched, constant(_identity(reduction, dtype), x), x))
    wide = "float32" if dtype in HALF else dtype
    result = _scattered(context, cast(context, x, wide), dim, index, cast(context, source, wide), reduction)
    if reduce == "mean":
        count = broadcast_to(context, relax.const(int(include_self), "int32"), sizes(x))
        count = _scattered(context, count, dim, index, 1, "add")
        count = cast(context, context.emit(op.maximum(count, relax.const(1, "int32"))), wide)
        result = context.emit((op.divide if "float" in wide else op.floor_divide)(result, count))
    return cast(context, result, dtype)


def _identity(reduction, dtype):
    if reduction in ("add", "multiply"):
        return int(reduction == "multiply")
    if "float" in dtype:
        return -math.inf if reduction == "amax" else math.inf
    if dtype == "bool":
        return reduction == "amin"
    limits = np.iinfo(dtype)
    return int(limits.min if reduction == "amax" else limits.max)


def _scattered(context, x, dim, index, source, reduction):
    """`x` with x[i, index[i, j, k], k] = reduction(…, source[i, j, k]) for dim 1; `source` may be longer than index."""
    shape = sizes(x)
    if not shape:
        x = reshaped(context, x, [1])
    if not sizes(index):
        index = reshaped(context, index, [1])
    if 0 in sizes(index) or 0 in sizes(x):
        return reshaped(context, x, shape)
    dim %= len(sizes(x))
    extents = sizes(index)
    if isinstance(source, relax.Expr):
        source = reshaped(context, source, [1]) if not sizes(source) else source
        for axis, extent in enumerate(extents):
            source = part(context, source, axis, 0, extent)
        source = cast(context, source, x.ty.dtype)
    region = x
    for axis, extent in enumerate(extents):
        region = part(context, region, axis, 0, extent) if axis != dim else region
    around = [math.prod(extents[:dim]), math.prod(extents[dim + 1 :])]
    thick = lambda value: reshaped(context, value, [around[0], -1, around[1]])
    source = thick(source) if isinstance(source, relax.Expr) else relax.const(np.full((1, 1, 1), source), x.ty.dtype)
    written = _kernel(context, thick(region), thick(index), source, reduction, False)
    written = reshaped(context, written, sizes(region))
    return reshaped(context, _put_back(context, x, written), shape)


def _put_back(context, x, region):
    """`x` with its leading corner, of the shape of `region`, replaced by `region`."""
    for axis in reversed(range(len(sizes(x)))):
        if sizes(region)[axis] < sizes(x)[axis]:
            around = x
            for before in range(axis):
                around = part(context, around, before, 0, sizes(region)[before])
            rest = part(context, around, axis, sizes(region)[axis], sizes(x)[axis])
            region = context.emit(op.concat([region, rest], axis))
    return region


def _kernel(context, x, index, source, reduction, wraps, rising=False):
    """Call the scatter kernel: x (outer, n, inner), index and source (outer or 1, updates or 1, inner or 1).

    The kernel reduces half precision in float32 and takes booleans as int32.
    """
    dtype = str(x.ty.dtype)
    wide = {"bool": "int32", "float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    if reduction == "set" and dtype in HALF:
        wide = dtype
    x, source = (cast(context, value, wide) for value in (x, source))
    function = scatter_kernel(
        sizes(x),
        max(sizes(index)[1], sizes(source)[1]),
        sizes(index),
        sizes(source),
        wide,
        str(index.ty.dtype),
        reduction,
        poison(dtype),
        wraps,
        rising,
    )
    name = context.builder.add_func(function, "scatter")
    result = context.emit(relax.call_tir(name, [x, index, source], relax.TensorType(sizes(x), wide)))
    return cast(context, result, dtype)


WRITING_CONVERTERS = {
    "index_put.default": index_put,
    "index_copy.default": index_copy,
    "index_add.default": index_add,
    "index_fill.int_Scalar": index_fill,
    "index_fill.int_Tensor": index_fill,
    "index_reduce.default": index_reduce,
    "put.default": put,
    "masked_scatter.default": masked_scatter,
    "scatter.src": scatter,
    "scatter.value": scatter,
    "scatter.reduce": scatter,
    "scatter.value_reduce": scatter,
    "scatter_add.default": scatter_add,
    "scatter_reduce.two": scatter_reduce,
}
