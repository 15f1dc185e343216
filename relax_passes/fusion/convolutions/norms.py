"""Group norms of values whose channels are last: (x - mean) / sqrt(variance + eps), then a factor and a summand each.

Sums of groups of several channels have two steps: over parts of `PART` places, channel by channel as memory has them,
then over the parts and the channels.  The variance is the mean of squared deviations.  The mean is that of differences
from the first element, so that equal elements have variance 0.  All of it is float32, or float64 for float64.
"""

import numpy as np
from tvm import relax

from relax_passes.fusion.convolutions.rows import padded, sliced
from relax_passes.ir.bindings import dtype_of, shape_of

op = relax.op
PART = 256
LEAST_PLACES = 4096  # fewer are summed in one step


def missing_places(count: int) -> int:
    """How many places to add to `count`, for whole parts."""
    return -count % PART if count >= LEAST_PLACES else 0


def is_of_channels(norm: relax.Call) -> bool:
    """Whether a group_norm has the channels second and reduces all that follows."""
    rank = len(shape_of(norm.args[0]))
    axes = sorted(int(axis) % rank for axis in norm.attrs.axes)
    return int(norm.attrs.channel_axis) % rank == 1 and axes == list(range(2, rank))


def emit_group_norm(emit, x, whole, norm: relax.Call, weight, bias) -> relax.Expr:
    """The group_norm `norm`, in its own dtype, of x (n, places, c).

    `whole` has the places of x, then `missing_places` of finite numbers; or it is None.
    """
    n, places, channels = shape_of(x)
    groups, dtype = int(norm.attrs.num_groups), dtype_of(norm)
    size = channels // groups
    wide = "float64" if dtype == "float64" else "float32"
    number = lambda value: relax.const(value, wide)
    widened = lambda value: value if dtype_of(value) == wide else emit(op.astype(value, wide))
    missing = missing_places(places)
    if whole is None:
        whole = padded(emit, x, [(0, 0), (0, missing), (0, 0)])
    part = PART if places >= LEAST_PLACES else places
    parts = (places + missing) // part
    inside = (np.arange(parts * part) < places).astype(wide).reshape(1, parts, part, 1, 1)

    def average(values):
        """The mean (n, 1, 1, groups, 1) of values (n, parts, part, groups, size)."""
        if missing:
            values = emit(op.multiply(values, relax.const(inside, wide)))
        if size > 1:
            values = emit(op.sum(values, axis=[2], keepdims=True))
        sums = emit(op.sum(values, axis=[1, 4] if size > 1 else [1, 2, 4], keepdims=True))
        return emit(op.multiply(sums, number(1 / (places * size))))

    def differences(center):
        """The center of each group minus `whole`, with a cast of its own, which then costs its kernel nothing."""
        return emit(op.subtract(center, widened(emit(op.reshape(whole, (n, parts, part, groups, size))))))

    # In the order of operators those that a sum reads precede it.  So the center is the first operand of the difference
    # and the scale that of the product: the casts for one sum or for the result do not precede the sums before it.
    first = emit(op.reshape(sliced(emit, x, 1, 0, 1), (n, 1, 1, groups, size)))
    first = widened(sliced(emit, first, 4, 0, 1))
    mean = emit(op.subtract(first, average(differences(first))))
    variance = average(emit(op.square(differences(mean))))
    scale = emit(op.rsqrt(emit(op.add(variance, number(float(norm.attrs.epsilon))))))

    def of_channels(value):
        value = value if size == 1 else emit(op.broadcast_to(value, (n, 1, 1, groups, size)))
        return emit(op.reshape(value, (n, 1, channels)))

    out = emit(op.multiply(of_channels(scale), emit(op.subtract(widened(x), of_channels(mean)))))
    if norm.attrs.scale:
        out = emit(op.multiply(out, widened(weight)))
    if norm.attrs.center:
        out = emit(op.add(out, widened(bias)))
    return out if dtype == wide else op.astype(out, dtype)
