"""torch.nn.functional.interpolate in all its modes, as taps: constant positions and weights of each dimension.

TVM's resize2d takes other positions for given scale factors and for nearest neighbours, and does not antialias.
"""

import numpy as np
from tvm import relax

from stof_tvm.frontend.operators.elementwise.formulas import Formulas
from stof_tvm.frontend.operators.reductions import dtype_of, shape_of
from tir_kernels.errors import UnsupportedError

op = relax.op


def resize(dimensions, taps, has_corners):
    """The converter of an upsample operator; `taps(size, out, scale)` gives pairs (places, weights or None)."""

    def convert(context, x, _size, *arguments):
        align_corners = bool(arguments[0]) if has_corners else False
        scales = list(arguments[1:] if has_corners else arguments)
        if context.node.target._overloadname == "vec":
            scales = scales[0] if scales and scales[0] else [None] * dimensions
        f = Formulas(context, "float32" if dtype_of(x) in ("float16", "bfloat16") else dtype_of(x))
        if not f.is_float and taps not in (nearest, nearest_exact):
            raise UnsupportedError(f"its operand of dtype {dtype_of(x)}")
        x, rank = f.cast(x, f.dtype), len(shape_of(x))
        for index in reversed(range(dimensions)):
            axis = rank - dimensions + index
            size, out = shape_of(x)[axis], context.shape[axis]
            if size != out or taps not in (nearest, nearest_exact, linear, cubic):
                scale = _scale(_type_of_places(f, taps), size, out, scales[index], align_corners)
                x = _along(f, x, axis, taps(size, out, scale, align_corners))
        return x

    return convert


def _along(f, x, axis, taps):
    total = None
    for places, weights in taps:
        picked = f.context.emit(op.take(x, relax.const(places, "int64"), axis=axis, mode="clip"))
        if weights is not None:
            shape = [-1 if d == axis else 1 for d in range(len(shape_of(x)))]
            picked = f.multiply(picked, relax.const(np.reshape(weights, shape), f.dtype))
        total = picked if total is None else f.add(total, picked)
    return total


def _type_of_places(f, taps):
    """The type in which PyTorch computes places; `scale` has it, so the taps compute in it, too."""
    return np.float64 if f.dtype == "float64" and taps not in (nearest, nearest_exact) else np.float32


def _scale(kind, size, out, given, align_corners):
    """Source pixels for each step of the result."""
    if align_corners:
        return kind(size - 1) / kind(out - 1) if out > 1 else kind(0)
    return kind(1.0 / given) if given else kind(size) / kind(out)


def nearest(size, out, scale, _):
    return [(np.minimum(np.floor(np.arange(out, dtype=type(scale)) * scale), size - 1).astype("int64"), None)]


def nearest_exact(size, out, scale, _):
    kind = type(scale)
    places = np.floor((np.arange(out, dtype=kind) + kind(0.5)) * scale)
    return [(np.minimum(places, size - 1).astype("int64"), None)]


def _centers(out, scale, align_corners):
    kind = type(scale)
    steps = np.arange(out, dtype=kind)
    return steps * scale if align_corners else (steps + kind(0.5)) * scale - kind(0.5)


def linear(size, out, scale, align_corners):
    centers = np.maximum(_centers(out, scale, align_corners), type(scale)(0))
    first = np.minimum(np.floor(centers), size - 1)
    share = np.clip(centers - first, 0, 1)
    return [(first.astype("int64"), 1 - share), (np.minimum(first + 1, size - 1).astype("int64"), share)]


def cubic(size, out, scale, align_corners):
    centers = _centers(out, scale, align_corners)
    first = np.floor(centers)
    share = centers - first
    taps = []
    for offset in (-1, 0, 1, 2):
        places = np.clip(first + offset, 0, size - 1).astype("int64")
        taps.append((places, _cubic_filter(share - offset, -0.75)))
    return taps


def _cubic_filter(x, a):
    x = np.abs(x)
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, inner, np.where(x < 2, outer, 0.0))


def antialiased(filter_of, width):
    """Taps of a filter that is widened for downsampling, as in Pillow."""

    def taps(size, out, scale, _):
        stretch = max(float(scale), 1.0)
        support = width * 0.5 * stretch
        centers = float(scale) * (np.arange(out) + 0.5)
        start = np.maximum((centers - support + 0.5).astype("int64"), 0)
        end = np.minimum((centers + support + 0.5).astype("int64"), size)
        count = max(1, int((end - start).max()))
        places = start[:, None] + np.arange(count)
        weights = np.where(places < end[:, None], filter_of((places - centers[:, None] + 0.5) / stretch), 0.0)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
        return [(np.minimum(places[:, t], size - 1), weights[:, t]) for t in range(count)]

    return taps


triangle = antialiased(lambda x: np.maximum(1 - np.abs(x), 0), 2)
smooth_cubic = antialiased(lambda x: _cubic_filter(x, -0.5), 4)

_MODES = {
    "upsample_nearest1d": (1, nearest, False),
    "upsample_nearest2d": (2, nearest, False),
    "upsample_nearest3d": (3, nearest, False),
    "_upsample_nearest_exact1d": (1, nearest_exact, False),
    "_upsample_nearest_exact2d": (2, nearest_exact, False),
    "_upsample_nearest_exact3d": (3, nearest_exact, False),
    "upsample_linear1d": (1, linear, True),
    "upsample_bilinear2d": (2, linear, True),
    "upsample_trilinear3d": (3, linear, True),
    "upsample_bicubic2d": (2, cubic, True),
    "_upsample_bilinear2d_aa": (2, triangle, True),
    "_upsample_bicubic2d_aa": (2, smooth_cubic, True),
}
RESIZING_CONVERTERS = {
    f"{name}.{overload}": resize(*mode) for name, mode in _MODES.items() for overload in ("default", "vec")
}
