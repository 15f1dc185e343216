"""LayerNorm, GroupNorm, RMSNorm and variances of any float in float32, or in float64 (for float64 and long sums).

TVM computes the variance of norms as E[x²] - E[x]², which cancels where the mean is large, and other variances about a
mean that is rounded; it refuses bfloat16, and sums squares in float16.  Here the squares are those of deviations from
the mean.  The mean is corrected first by the mean of the deviations from it, so that a row of equal numbers has
variance 0, as in PyTorch.
"""

import math

import tvm
from tvm import te, tirx

LONG, LONG_ROW = 1024, 65536  # numbers in a long sum; in one that includes the last dimension


def legalize_layer_norm(builder, call):
    """x (…, *normalized), weight and bias (*normalized,); `axes` may be in any order."""
    rank = len(call.args[0].ty.shape)
    axes = [int(axis) % rank for axis in call.attrs.axes]

    def layer_norm(x, weight, bias):
        wide = _wide_type(x, axes)
        keys = lambda index: [index[a] for a in range(rank) if a not in axes]
        mean, shift, square, count = _moments(x, axes, wide)

        def element(*index):
            scale = tirx.rsqrt(square(*keys(index)) / count + tirx.const(call.attrs.epsilon, wide))
            at = [index[a] for a in axes]
            centred = _centred(x(*index), mean(*keys(index)), shift(*keys(index)), count, wide)
            return _affine(centred * scale, weight(*at), bias(*at), wide).astype(x.dtype)

        return te.compute(x.shape, element, name="layer_norm")

    return builder.call_te(layer_norm, *call.args, primfunc_name_hint="layer_norm")


def legalize_rms_norm(builder, call):
    """x (…, *normalized), weight (*normalized,)."""
    rank = len(call.args[0].ty.shape)
    axes = [int(axis) % rank for axis in call.attrs.axes]

    def rms_norm(x, weight):
        wide = _wide_type(x, axes)
        square = _reduced(x, axes, wide, lambda value, *_: value * value, "square")
        count = _count(x, axes, wide)

        def element(*index):
            kept = [index[a] for a in range(rank) if a not in axes]
            scale = tirx.rsqrt(square(*kept) / count + tirx.const(call.attrs.epsilon, wide))
            value = x(*index).astype(wide) * scale * weight(*(index[a] for a in axes)).astype(wide)
            return value.astype(x.dtype)

        return te.compute(x.shape, element, name="rms_norm")

    return builder.call_te(rms_norm, *call.args, primfunc_name_hint="rms_norm")


def legalize_group_norm(builder, call):
    """x (batch, channels, …), weight and bias (channels,); as TVM does if channels are not dimension 1."""
    attrs, shape = call.attrs, call.args[0].ty.shape
    rank = len(shape)
    is_plain = int(attrs.channel_axis) % rank == 1 and [int(a) % rank for a in attrs.axes] == list(range(2, rank))
    if not is_plain or not isinstance(shape[1], tirx.IntImm):
        return call.op.get_attr("FLegalize")(builder, call)
    channels = int(shape[1]) // int(attrs.num_groups)  # of a group

    def group_norm(x, weight, bias):
        wide = _wide_type(x, range(1, rank))
        parted = [x.shape[0], attrs.num_groups, channels, *x.shape[2:]]
        grouped = _Grouped(x, parted, lambda n, g, c, *rest: x(n, g * channels + c, *rest))
        mean, shift, square, count = _moments(grouped, list(range(2, rank + 1)), wide)

        def element(*index):
            row = index[0], tirx.floordiv(index[1], channels)
            scale = tirx.rsqrt(square(*row) / count + tirx.const(attrs.epsilon, wide))
            centred = _centred(x(*index), mean(*row), shift(*row), count, wide)
            return _affine(centred * scale, weight(index[1]), bias(index[1]), wide).astype(x.dtype)

        return te.compute(x.shape, element, name="group_norm")

    return builder.call_te(group_norm, *call.args, primfunc_name_hint="group_norm")


def legalize_variance(builder, call):
    """x along `axis`, any number of dimensions; divided by the number of elements."""
    rank = len(call.args[0].ty.shape)
    axes = range(rank) if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]

    def variance(x):
        wide = _wide_type(x, axes)
        *_, square, count = _moments(x, list(axes), wide)
        kept = [a for a in range(rank) if a not in axes]
        keys = lambda index: [index[a] for a in kept] if call.attrs.keepdims else index
        shape = [1 if a in axes else x.shape[a] for a in range(rank) if call.attrs.keepdims or a in kept]
        return te.compute(shape, lambda *index: (square(*keys(index)) / count).astype(x.dtype), name="variance")

    return builder.call_te(variance, call.args[0], primfunc_name_hint="variance")


class _Grouped:
    """A tensor read in another shape, without a block of its own."""

    def __init__(self, x, shape, read):
        self.shape, self.dtype, self.read = shape, x.dtype, read

    def __call__(self, *index):
        return self.read(*index)


def _moments(x, axes, wide: str):
    """Sums along `axes` of x, of x - mean, and of (x - corrected mean)²; and the number of summands."""
    count = _count(x, axes, wide)
    total = _reduced(x, axes, wide, lambda value, *_: value, "total")
    shift = _reduced(x, axes, wide, lambda value, *kept: value - total(*kept) / count, "shift")

    def squared(value, *kept):
        away = value - total(*kept) / count - shift(*kept) / count
        return away * away

    return total, shift, _reduced(x, axes, wide, squared, "square"), count


def _reduced(x, axes, wide: str, function, name: str):
    """The sums along `axes` of function(element in the wide dtype, *index of the others)."""
    rank = len(x.shape)
    kept = [a for a in range(rank) if a not in axes]
    reduced = [te.reduce_axis((0, x.shape[a]), name=f"k{a}") for a in axes]

    def element(*index):
        at = dict(zip(kept, index)) | dict(zip(axes, reduced))
        return te.sum(function(x(*(at[a] for a in range(rank))).astype(wide), *index), axis=reduced)

    return te.compute([x.shape[a] for a in kept], element, name=name)


def _count(x, axes, wide: str):
    count = tirx.const(1, "int64")
    for axis in axes:
        count = count * x.shape[axis]
    return count.astype(wide)


def _centred(x, total, shift, count, wide: str):
    return x.astype(wide) - total / count - shift / count


def _affine(x, weight, bias, wide: str):
    return x * weight.astype(wide) + bias.astype(wide)


def _wide_type(x, axes) -> str:
    """The dtype of sums along `axes`: on a CPU float64 for many numbers, which GPUs add in thousands of threads."""
    target = tvm.target.Target.current(allow_none=True)
    counts = [int(x.shape[axis]) for axis in axes if isinstance(x.shape[axis], tirx.IntImm)]
    # The last dimension is added in many lanes, others in one.
    most = LONG_ROW if len(x.shape) - 1 in axes else LONG
    is_long = math.prod(counts) >= most and target is not None and target.kind.name == "llvm"
    return "float64" if x.dtype == "float64" or is_long else "float32"


NORMS = {
    "relax.nn.layer_norm": legalize_layer_norm,
    "relax.nn.rms_norm": legalize_rms_norm,
    "relax.nn.group_norm": legalize_group_norm,
    "relax.variance": legalize_variance,
}
