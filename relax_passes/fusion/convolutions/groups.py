"""A convolution of several groups along one axis: a product for each group, of rows that its channels give.

    concat of matmul(take(channels of x, places), matrix)     x (n, length, c_in), rows (n, count / p, k)

A row covers what the kernel reads at p neighbouring places, and gives the result of all p: the matrix holds the kernel
p times, each shifted by one stride, between zeros.  So rows that overlap in most of their elements are p times fewer,
and a product of few columns has p times as many.  The number of operations grows by an eighth at most.  An infinity or
a NaN makes NaNs of all p places.
"""

import numpy as np
from tvm import relax

from relax_passes.fusion.convolutions.rows import ALIGNED, Window, padded, sliced
from relax_passes.ir.bindings import shape_of

op = relax.op
MAX_GROUPS = 32  # each is a product of its own
MAX_ELEMENTS = 1 << 31
MAX_PLACES = 4  # of a row
MAX_COLUMNS = 256
MAX_MATRIX = 4_000_000  # elements of a matrix that holds zeros


def pays(n: int, weight: tuple[int, ...], window: Window, groups: int) -> bool:
    """Whether products are worth it for a weight (c_out, c_in / groups, kernel) and n inputs."""
    c_out, channels, kernel = weight
    if not 1 < groups <= MAX_GROUPS or channels == 1 or c_out // groups % ALIGNED or channels * kernel % ALIGNED:
        return False
    return groups * n * window.count * channels * kernel < MAX_ELEMENTS


def emit_products(emit, x, weight, bias, window: Window, groups: int) -> relax.Expr:
    """The convolution (n, count, c_out) of x (n, length, c_in) with a weight (c_out, c_in / groups, kernel).

    `bias` (c_out,) may be None.
    """
    c_out, channels, _ = shape_of(weight)
    n, columns = shape_of(x)[0], c_out // groups
    p = places_of_row(window, channels, columns)
    covered = (p - 1) * window.stride + window.kernel
    rows = -(-window.count // p)
    places = np.arange(rows)[:, None] * (p * window.stride) + np.arange(covered) * window.dilation
    after = max(0, int(places[-1, -1]) + 1 - window.before - window.length)
    results = []
    for group in range(groups):
        part = padded(emit, sliced(emit, x, 2, group * channels, channels), [(0, 0), (window.before, after), (0, 0)])
        gathered = emit(op.take(part, relax.const(places, "int64"), axis=1, mode="clip"))
        gathered = emit(op.reshape(gathered, (n, rows, covered * channels)))
        matrix = _matrix(emit, sliced(emit, weight, 0, group * columns, columns), window, p)
        product = emit(op.matmul(gathered, emit(op.permute_dims(matrix, [1, 0]))))
        if bias is not None:
            own = emit(op.broadcast_to(sliced(emit, bias, 0, group * columns, columns), (p, columns)))
            product = emit(op.add(product, emit(op.reshape(own, (p * columns,)))))
        results.append(emit(op.reshape(product, (n, rows * p, columns))))
    return sliced(emit, emit(op.concat(results, axis=2)), 1, 0, window.count)


def places_of_row(window: Window, channels: int, columns: int) -> int:
    """How many places of the result a row covers: a power of 2."""
    p = MAX_PLACES
    while p > 1:
        more = (p - 1) * window.stride
        size = (window.kernel + more) * channels
        fits = p * columns <= MAX_COLUMNS and p * columns * size <= MAX_MATRIX and size % ALIGNED == 0
        if fits and window.dilation == 1 and 8 * more <= window.kernel and p <= window.count:
            return p
        p //= 2
    return p


def _matrix(emit, weight, window: Window, p: int) -> relax.Expr:
    """The matrix (p · c_out, k · c) of a group's weight (c_out, c, kernel)."""
    sides = [(i * window.stride, (p - 1 - i) * window.stride) for i in range(p)]
    shifted = [padded(emit, weight, [(0, 0), (0, 0), side]) for side in sides]
    weight = shifted[0] if p == 1 else emit(op.concat(shifted, axis=0))
    rows, channels, covered = shape_of(weight)
    return emit(op.reshape(emit(op.permute_dims(weight, [0, 2, 1])), (rows, covered * channels)))
