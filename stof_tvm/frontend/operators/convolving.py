"""Convolutions in the operands' dtype (TVM types all float32); half precision is computed in float32."""

from tvm import relax

from stof_tvm.frontend.operators.reductions import dtype_of, formulas, shape_of
from tir_kernels.errors import UnsupportedError

op = relax.op
CONVOLUTIONS = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}
SPACE = {1: "W", 2: "HW", 3: "DHW"}


def convolution(context, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    f = formulas(context, x)
    if not f.is_float:
        raise UnsupportedError(f"its operand of dtype {dtype_of(x)}")
    x, weight = f.cast(x, f.dtype), f.cast(weight, f.dtype)
    dimensions = len(shape_of(weight)) - 2
    is_batch = len(shape_of(x)) == dimensions + 2
    x = x if is_batch else context.emit(op.expand_dims(x, 0))
    options = {"groups": groups, "data_layout": f"NC{SPACE[dimensions]}", "out_dtype": f.dtype}
    options |= {"strides": stride, "padding": padding, "dilation": dilation}
    options |= {"kernel_layout": f"{'IO' if transposed else 'OI'}{SPACE[dimensions]}"}
    if transposed:
        result = TRANSPOSED[dimensions](x, weight, output_padding=output_padding, **options)
    else:
        result = CONVOLUTIONS[dimensions](x, weight, **options)
    result = context.emit(result)
    if bias is not None:
        channels = context.emit(op.reshape(f.cast(bias, f.dtype), [1, -1] + [1] * dimensions))
        result = f.add(result, channels)
    return result if is_batch else context.emit(op.squeeze(result, 0))


def plain(context, x, weight, bias, stride, padding, dilation, groups):
    """conv1d, conv2d or conv3d."""
    return convolution(context, x, weight, bias, stride, padding, dilation, False, None, groups)


CONVOLUTION_CONVERTERS = {
    "convolution.default": convolution,
    **dict.fromkeys(("conv1d.default", "conv2d.default", "conv3d.default"), plain),
}
