"""embedding_bag: sums, means and maxima of rows of a table, over bags that begin at offsets known only at run time."""

import math

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.converters import HALF, cast
from stof_tvm.frontend.operators.indexing.reading import broadcast_to, part, read, reshaped, sizes
from stof_tvm.frontend.operators.indexing.writing import write_slices
from tir_kernels.errors import UnsupportedError

op = relax.op
SUM, MEAN, MAX = 0, 1, 2


def embedding_bag(
    context,
    weight,
    indices,
    offsets,
    scale_grad=False,
    mode=SUM,
    sparse=False,
    weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """The first result of embedding_bag; the others serve the gradient, and UnsupportedError is raised if one is read.

    An empty bag is 0.  A row at `padding_idx` belongs to no bag.
    """
    if any(user.args[1] != 0 for user in context.node.users):
        raise UnsupportedError("only the first result of embedding_bag has a converter")
    dtype = str(weight.ty.dtype)
    wide = "float32" if dtype in HALF else dtype
    count, width = sizes(indices)[0], sizes(weight)[1]
    rows = cast(context, read(context, weight, indices, 0, wraps=False), wide)
    if weights is not None:
        rows = context.emit(op.multiply(rows, reshaped(context, cast(context, weights, wide), [count, 1])))
    bags = sizes(offsets)[0]
    bag = _bag_of_each(context, offsets, count)
    nothing = -math.inf if mode == MAX else 0
    keeps = None
    if padding_idx is not None and padding_idx >= 0:
        keeps = context.emit(op.not_equal(indices, relax.const(padding_idx, str(indices.ty.dtype))))
        kept = reshaped(context, keeps, [count, 1])
        rows = context.emit(op.where(kept, rows, relax.const(nothing, wide)))
    start = broadcast_to(context, relax.const(nothing, wide), [bags, width])
    result = write_slices(context, start, 0, bag, rows, "amax" if mode == MAX else "add", False)
    if mode != SUM:
        ones = relax.const(np.ones(count), wide) if keeps is None else context.emit(op.astype(keeps, wide))
        none = broadcast_to(context, relax.const(0, wide), [bags])
        length = reshaped(context, write_slices(context, none, 0, bag, ones, "add", False), [bags, 1])
        empty = context.emit(op.equal(length, relax.const(0, wide)))
        length = context.emit(op.where(empty, relax.const(1, wide), length))
        result = context.emit(op.divide(result, length)) if mode == MEAN else result
        result = context.emit(op.where(empty, relax.const(0, wide), result))
    result = part(context, result, 0, 0, bags - int(include_last_offset))
    return relax.Tuple([cast(context, result, dtype)])


def _bag_of_each(context, offsets, count):
    """The last bag that begins at or before each index."""
    positions = relax.const(np.arange(count)[:, None], str(offsets.ty.dtype))
    begun = context.emit(op.astype(context.emit(op.less_equal(offsets, positions)), "int32"))
    return context.emit(op.subtract(context.emit(op.sum(begun, 1)), relax.const(1, "int32")))


EMBEDDING_BAG_CONVERTERS = {
    "embedding_bag.padding_idx": embedding_bag,
    "embedding_bag.default": embedding_bag,
    "_embedding_bag_forward_only.default": embedding_bag,
    "_embedding_bag.default": embedding_bag,
}
