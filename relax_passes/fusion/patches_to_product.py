"""PatchesToProduct: the convolution that cuts an image into patches becomes a matrix product.

    permute_dims(reshape(conv2d(x, w) + b, (n, c_out, h * w)), [0, 2, 1])     strides are the kernel's size
    matmul(patches (n, h * w, c_in * p * q), w (c_in * p * q, c_out)) + b

Vision transformers begin in this way.  The image is read once and rearranged; a kernel template computes the product
with its elementwise steps.  Casts from half precision to float32 before the convolution, and back after it, vanish,
because products accumulate in float32 anyway.  With weights in float32 the casts and the convolution stay.  Image,
weight, bias and result have one float dtype apart from such casts.

Preconditions: "main" is one dataflow block; before `FoldClosedExpressions`, which rearranges the weight once.
"""

import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of, permutation, shape_of, static_shape
from relax_passes.ir.rebuild import rebuild

op = relax.op
HALF = ("float16", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="PatchesToProduct")
class PatchesToProduct:
    """Rewrite every such convolution of "main" whose patches lie side by side and cover the image."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])

        def replace(builder, var, new):
            found = _match(bindings, var)
            if found is None:
                return None
            conv, x, bias = found
            dtype = dtype_of(var)
            n, c_in, height, width = shape_of(x)
            c_out, _, p, q = shape_of(conv.args[1])
            rows, columns = height // p, width // q
            emit = builder.emit
            image = emit(op.reshape(new(x), (n, c_in, rows, p, columns, q)))
            image = emit(op.permute_dims(image, [0, 2, 4, 1, 3, 5]))
            patches = emit(op.reshape(image, (n, rows * columns, c_in * p * q)))
            weight = emit(op.reshape(_as(builder, new(conv.args[1]), dtype), (c_out, c_in * p * q)))
            product = emit(op.matmul(patches, emit(op.permute_dims(weight, [1, 0]))))
            if bias is None:
                return product
            return op.add(product, emit(op.reshape(_as(builder, new(bias), dtype), (c_out,))))

        return rebuild(mod, replace)


def _match(bindings: Bindings, var):
    """(conv2d, image, bias or None) where `var` has the patches of an image as rows; else None."""
    turned = bindings.call(var, "permute_dims")
    if turned is None or permutation(turned) != [0, 2, 1]:
        return None
    flat = bindings.call(turned.args[0], "reshape")
    if flat is None:
        return None
    dtype = dtype_of(var)
    whole = _in_float32(bindings, flat.args[0], dtype)
    added = bindings.call(whole, "add")
    conv = bindings.call(added.args[0] if added is not None else whole, "nn.conv2d")
    if conv is None or not _cuts_patches(conv) or dtype_of(conv) not in (dtype, "float32"):
        return None
    x, w = _before_float32(bindings, conv.args[0], dtype), conv.args[1]
    c_out, _, p, q = shape_of(w)
    n, _, height, width = shape_of(x)
    if dtype_of(x) != dtype or static_shape(var) != (n, height // p * (width // q), c_out):
        return None
    bias = None if added is None else added.args[1]
    if bias is not None and static_shape(bias) not in ((1, c_out, 1, 1), (c_out, 1, 1)):
        return None
    # A constant that is wider than the result would be rounded before the product instead of after it.
    for constant in (w,) if bias is None else (w, bias):
        shaped = bindings.call(constant, "reshape")
        if dtype_of(_before_float32(bindings, constant if shaped is None else shaped.args[0], dtype)) != dtype:
            return None
    return conv, x, bias


def _cuts_patches(conv: relax.Call) -> bool:
    attrs, image, weight = conv.attrs, static_shape(conv.args[0]), static_shape(conv.args[1])
    if image is None or weight is None:
        return False
    (_, _, height, width), (_, _, p, q) = image, weight
    return (
        (attrs.data_layout, attrs.kernel_layout, attrs.groups) == ("NCHW", "OIHW", 1)
        and [int(s) for s in attrs.strides] == [p, q]
        and not any(int(n) for n in attrs.padding)
        and all(int(n) == 1 for n in attrs.dilation)
        and height % p == width % q == 0
    )


def _in_float32(bindings: Bindings, expr, dtype: str):
    """`expr` before a cast from float32 to a half precision `dtype`."""
    cast = bindings.call(expr, "astype") if dtype in HALF and dtype_of(expr) == dtype else None
    return cast.args[0] if cast is not None and dtype_of(cast.args[0]) == "float32" else expr


def _before_float32(bindings: Bindings, expr, dtype: str):
    """`expr` before a cast from a half precision `dtype` to float32."""
    cast = bindings.call(expr, "astype") if dtype in HALF and dtype_of(expr) == "float32" else None
    return cast.args[0] if cast is not None and dtype_of(cast.args[0]) == dtype else expr


def _as(builder, expr, dtype: str):
    return expr if dtype_of(expr) == dtype else builder.emit(op.astype(expr, dtype))
