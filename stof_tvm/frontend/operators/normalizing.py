"""Batch norms, and layer norm with its statistics, where PyTorch leaves them whole."""

from tvm import relax

from stof_tvm.frontend.operators.converters import layer_norm
from stof_tvm.frontend.operators.reductions import formulas, shape_of
from tir_kernels.errors import UnsupportedError

op = relax.op


def batch_norm(context, x, weight, bias, mean, variance, momentum, epsilon):
    """By running statistics: (x - mean) / sqrt(variance + epsilon) * weight + bias, all per channel."""
    _only_values(context)
    f = formulas(context, x)
    return relax.Tuple([_normalized(f, f.cast(x, f.dtype), mean, variance, weight, bias, epsilon)])


def batch_norm_of_the_batch(context, x, weight, bias, training, momentum, epsilon):
    """By the batch's own mean and variance."""
    _only_values(context)
    f = formulas(context, x)
    x = f.cast(x, f.dtype)
    axes = [d for d in range(len(shape_of(x))) if d != 1]
    # Subtract a rounded mean first: the mean that is left is small.
    x = f.subtract(x, context.emit(op.mean(x, axes, True)))
    mean, variance = (context.emit(statistic(x, axes, False)) for statistic in (op.mean, op.variance))
    return relax.Tuple([_normalized(f, x, mean, variance, weight, bias, epsilon)])


def _normalized(f, x, mean, variance, weight, bias, epsilon):
    shape = [-1 if d == 1 else 1 for d in range(len(shape_of(x)))]
    channels = lambda y: f.context.emit(op.reshape(f.cast(y, f.dtype), shape))
    scale = f.rsqrt(f.add(channels(variance), float(epsilon)))
    if weight is not None:
        scale = f.multiply(scale, channels(weight))
    x = f.multiply(f.subtract(x, channels(mean)), scale)
    return x if bias is None else f.add(x, channels(bias))


def native_layer_norm(context, x, normalized_shape, weight, bias, epsilon):
    _only_values(context)
    return relax.Tuple([layer_norm(context, x, normalized_shape, weight, bias, epsilon)])


def _only_values(context):
    if any(user.args[1] != 0 for user in context.node.users):
        raise UnsupportedError("the statistics beside the values")


NORMALIZING_CONVERTERS = {
    "_native_batch_norm_legit.no_stats": batch_norm_of_the_batch,
    "_native_batch_norm_legit_no_training.default": batch_norm,
    "native_layer_norm.default": native_layer_norm,
}
