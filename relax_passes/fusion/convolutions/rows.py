"""The rows whose product with its weight a convolution is: what the kernel covers at each place of the result."""

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax

from relax_passes.ir.bindings import dtype_of, shape_of

op = relax.op
ALIGNED = 8  # kernels read the rows of a product 16 bytes at a time: eight numbers in half precision
# Rows that begin between the 32 bytes that memory gives at a time are read twice in part: 28 µs at 131,072 × 64 × 152,
# 18 at × 160 on an H200.  Short rows would grow by too much.
SECTOR, SHORT = 16, 64
MAX_PIECES = 16  # along one axis; a gather from more is slow, because each element searches for its piece


@dataclass(frozen=True)
class Window:
    """How a kernel moves along one axis of its input.

    Attributes
    ----------
    length : int
        The input's length.
    kernel, stride, dilation : int
        The number of the kernel's elements, its step, and the distance of its elements.
    before, after : int
        The zeros on either side of the input.
    """

    length: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def count(self) -> int:
        """The length of the result."""
        return (self.length + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def places(self) -> np.ndarray:
        """(count, kernel): where in the padded input each place of the result reads."""
        return np.arange(self.count)[:, None] * self.stride + np.arange(self.kernel) * self.dilation

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first element, number of elements) of the pieces of the kernel that are neighbours within one stride."""
        if self.dilation > 1:
            return [(j * self.dilation, 1) for j in range(self.kernel)]
        return [(j, min(self.stride, self.kernel - j)) for j in range(0, self.kernel, self.stride)]

    @property
    def padding(self) -> tuple[int, int]:
        """The zeros before and after the input that the pieces read."""
        ends = (first + (self.count - 1) * self.stride + (1 if n == 1 else self.stride) for first, n in self.pieces)
        return self.before, max(0, max(ends) - self.before - self.length)


def row_length(windows: list[Window], channels: int) -> int:
    """The length of a row: a multiple of `ALIGNED`, and of `SECTOR` where it is not `SHORT`."""
    size = channels * math.prod(window.kernel for window in windows)
    unit = SECTOR if size > SHORT else ALIGNED
    return -(-size // unit) * unit


def emit_rows(emit, x, windows: list[Window], is_last: bool, is_cuda: bool) -> relax.Expr:
    """The rows (n, places, k) of x (n, …, c) if the channels are last, else of x (n, c, …).

    In a row the channels of each of the kernel's elements are neighbours, or the elements of each channel.  Zeros
    follow up to `row_length`.
    """
    n, places = shape_of(x)[0], math.prod(window.count for window in windows)
    # Pieces that are wider than one element are reshapes of cut elements.  Along one axis LLVM's kernels have few of
    # their quotients; where each is read through those of another axis they do not end.
    overlap = [window for window in windows if len(window.pieces) > 1 and window.stride > 1]
    gathered = _taken if overlap and len(windows) > 1 and not is_cuda else _joined
    if is_last:
        channels = shape_of(x)[-1]
        rows = gathered(emit, x, windows)
    else:
        channels, *space = shape_of(x)[1:]
        rows = gathered(emit, emit(op.reshape(x, (n * channels, *space, 1))), windows)
        rows = emit(op.reshape(rows, (n, channels, places, shape_of(rows)[-1])))
        rows = emit(op.permute_dims(rows, [0, 2, 1, 3]))
    size = channels * math.prod(window.kernel for window in windows)
    if shape_of(rows) != (n, places, size):
        rows = emit(op.reshape(rows, (n, places, size)))
    return padded(emit, rows, [(0, 0), (0, 0), (0, row_length(windows, channels) - size)])


def emit_matrix(emit, weight, windows: list[Window], is_last: bool) -> relax.Expr:
    """The matrix (c_out, k) of a weight (c_out, c_in, …), in the order of the rows."""
    c_out, c_in, *kernel = shape_of(weight)
    size = c_in * math.prod(kernel)
    if is_last and 1 < c_in < size:
        weight = emit(op.permute_dims(weight, [0, *range(2, len(kernel) + 2), 1]))
    matrix = emit(op.reshape(weight, (c_out, size)))
    return padded(emit, matrix, [(0, 0), (0, row_length(windows, c_in) - size)])


def _taken(emit, x, windows: list[Window]) -> relax.Expr:
    """The rows (n, …, kernel · c) of x (n, …, c), at places that are read from tables."""
    n, *_, channels = shape_of(x)
    ends = [int(window.places[-1, -1]) + 1 - window.before - window.length for window in windows]
    widths = [(window.before, max(0, end)) for window, end in zip(windows, ends, strict=True)]
    x = padded(emit, x, [(0, 0), *widths, (0, 0)])
    x = windowed(emit, x, windows)
    rank = len(windows)
    order = [0, *(1 + 2 * i for i in range(rank)), *(2 + 2 * i for i in range(rank)), 1 + 2 * rank]
    x = emit(op.permute_dims(x, order))
    kernel = math.prod(window.kernel for window in windows)
    return emit(op.reshape(x, (n, *(window.count for window in windows), kernel * channels)))


def windowed(emit, x, windows: list[Window]) -> relax.Expr:
    """The views (n, count, kernel, …, c) of padded x (n, …, c): what each place of the result reads."""
    for i, window in enumerate(windows):
        x = emit(op.take(x, relax.const(window.places, "int64"), axis=1 + 2 * i, mode="clip"))
    return x


def _joined(emit, x, windows: list[Window]) -> relax.Expr:
    """The rows (n, …, kernel · c) of x (n, …, c), joined from slices."""
    x = padded(emit, x, [(0, 0), *(window.padding for window in windows), (0, 0)])
    for axis, window in reversed(list(enumerate(windows, 1))):
        pieces = [_piece(emit, x, axis, window, *piece) for piece in window.pieces]
        x = pieces[0] if len(pieces) == 1 else emit(op.concat(pieces, axis=-1))
    return x


def _piece(emit, x, axis: int, window: Window, first: int, width: int) -> relax.Expr:
    """`width` neighbours of the kernel's elements, beside each other among the channels."""
    if width == 1:
        return sliced(emit, x, axis, first, (window.count - 1) * window.stride + 1, window.stride)
    x = sliced(emit, x, axis, first, window.count * window.stride)
    *before, _, channels = (*shape_of(x)[: axis + 1], shape_of(x)[-1])
    behind = shape_of(x)[axis + 1 : -1]
    x = emit(op.reshape(x, (*before, window.count, window.stride, *behind, channels)))
    x = sliced(emit, x, axis + 1, 0, width)
    if behind:
        last = axis + 2 + len(behind)
        x = emit(op.permute_dims(x, [*range(axis + 1), *range(axis + 2, last), axis + 1, last]))
    return emit(op.reshape(x, (*before, window.count, *behind, width * channels)))


def sliced(emit, x, axis: int, first: int, length: int, stride: int = 1) -> relax.Expr:
    """The elements of `x` along an axis from `first` on, in a span of `length`, `stride` apart."""
    if (first, length, stride) == (0, shape_of(x)[axis], 1):
        return x
    return emit(op.strided_slice(x, [axis], [first], [first + length], [stride]))


def padded(emit, x, widths: list[tuple[int, int]]) -> relax.Expr:
    """`x` between zeros, as many as `widths` has for each axis."""
    zero = relax.const(0, dtype_of(x))
    for axis, sides in enumerate(widths):
        shape = shape_of(x)
        zeros = [emit(op.broadcast_to(zero, (*shape[:axis], n, *shape[axis + 1 :]))) if n else None for n in sides]
        parts = [part for part in (zeros[0], x, zeros[1]) if part is not None]
        x = emit(op.concat(parts, axis=axis)) if len(parts) > 1 else x
    return x
