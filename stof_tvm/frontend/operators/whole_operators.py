"""ATen operators that PyTorch would decompose, each converted to what TVM's converters would give for its parts.

So a program that has them need not be decomposed (direct.py), and its Relax is the same as if it had been.
"""

from tvm import relax

from stof_tvm.frontend.operators.converters import concat, copy

op = relax.op


def same(context, x, *_):
    return x


def reshape(context, x, *_):
    return x if [int(n) for n in x.ty.shape] == context.shape else context.emit(op.reshape(x, context.shape))


def transpose(context, x, first, second):
    axes = list(range(len(x.ty.shape)))
    axes[first], axes[second] = axes[second], axes[first]
    return context.emit(op.permute_dims(x, axes))


def transpose_matrix(context, x):
    return transpose(context, x, -2, -1) if len(context.shape) > 1 else x


def stack(context, tensors, dim=0):
    axis = dim % len(context.shape)
    return concat(context, [context.emit(op.expand_dims(x, axis)) for x in tensors], axis)


def split(context, x, size, dim=0):
    """Parts of `size` elements; the last one has the rest."""
    ends = list(range(size, int(x.ty.shape[dim]), size))
    return context.emit(op.split(x, ends, dim))


def chunk(context, x, chunks, dim=0):
    return split(context, x, -(-int(x.ty.shape[dim]) // chunks), dim)


def difference(context, x, n=1, dim=-1, prepend=None, append=None):
    parts = [part for part in (prepend, x, append) if part is not None]
    x = context.emit(op.concat(parts, dim)) if len(parts) > 1 else x
    for _ in range(n):
        length = int(x.ty.shape[dim])
        earlier, later = (context.emit(op.strided_slice(x, [dim], [i], [length - 1 + i], [1])) for i in (0, 1))
        x = context.emit((op.logical_xor if context.dtype == "bool" else op.subtract)(later, earlier))
    return x


WHOLE_CONVERTERS = {
    "to.dtype": copy,
    "to.dtype_layout": copy,
    "to.device": copy,
    "to.other": copy,
    "type_as.default": copy,
    "contiguous.default": same,
    "detach.default": same,
    "reshape.default": reshape,
    "flatten.using_ints": reshape,
    "unflatten.int": reshape,
    "transpose.int": transpose,
    "t.default": transpose_matrix,
    "mT.default": transpose_matrix,
    "stack.default": stack,
    "split.Tensor": split,
    "chunk.default": chunk,
    "diff.default": difference,
}
