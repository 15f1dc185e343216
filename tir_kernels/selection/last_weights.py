"""The softmax weights of the last queries of a prompt, summed by key and by distance, on CUDA (sm_80 and up).

The weights themselves are never there.  A first kernel, a CTA a row, finds what a row's weights are divided by; a
second one, a thread for a few keys and as many distances, reads the products again and sums their weights over the
rows.  Neighbouring threads read neighbouring products, and no sum depends on the order in which threads run.
"""

import functools
import math

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernels' builds need its compile callback
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.ptx import ALL_LANES

THREADS = 256
WARPS = THREADS // WARP
AT_ONCE = 8  # products of a thread whose loads are under way together
KEYS = 2  # of a thread of the second kernel, and as many distances
ROWS_AT_ONCE = 4
LEAST = -3.4028234663852886e38  # of float32: exp2(-inf - LEAST) is 0, where exp2(-inf - -inf) is NaN
MINUS_INFINITY = 0xFF800000  # its bits


@functools.cache
def normalizers() -> tvm.tirx.PrimFunc:
    """The first kernel; arguments products, normalizer, rows, scale.

    products : float32 (heads * rows, n)
        Of the last queries with all n keys; row r of a head sees the keys j <= n - rows + r.
    normalizer : float32 (heads * rows, 2)
        (m, 1 / s) of each row: its weights are exp2(exponent - m) / s, `exponent` being log2(e) * scale * product.  As
        a softmax has it, all are NaN in a row with NaN or infinity, also at a key that it does not see, and in one of
        nothing but -inf.
    rows : int32
        At least 1 and at most n.
    scale : float32
    """

    @T.inline
    def merge(largest, total, other_largest, other_total):
        """Joins another part of a row: the largest exponent of both, and their sum of exp2(exponent - largest)."""
        both = T.alloc_local([1], "float32")
        both[0] = T.max(largest[0], other_largest)
        total[0] = total[0] * T.exp2(largest[0] - both[0]) + other_total * T.exp2(other_largest - both[0])
        largest[0] = both[0]

    @T.inline
    def add(all_seen, largest, total, products, line, first, last, n, scale):
        """Joins keys `first`, THREADS on and so forth; past the end, the last product is read again, and not seen."""
        product = T.alloc_local([AT_ONCE], "float32")
        both = T.alloc_local([1], "float32")
        both[0] = largest[0]
        for i in T.unroll(AT_ONCE):
            product[i] = products[line, at_most(all_seen, first + i * THREADS, n - 1)]
        for i in T.unroll(AT_ONCE):
            is_seen = T.meta_var(first + i * THREADS <= last)
            both[0] = T.max(both[0], exponent(product[i], scale, T.float32(0), all_seen, is_seen))
        total[0] = total[0] * T.exp2(largest[0] - both[0])
        largest[0] = both[0]
        for i in T.unroll(AT_ONCE):
            is_seen = T.meta_var(first + i * THREADS <= last)
            total[0] = total[0] + T.exp2(exponent(product[i], scale, largest[0], all_seen, is_seen))

    @T.jit(private=True)
    def kernel(products_handle: T.handle, normalizer_handle: T.handle, rows: T.int32, scale: T.float32):
        lines = T.int32()
        n = T.int32()
        products = T.match_buffer(products_handle, (lines, n), "float32")
        normalizer = T.match_buffer(normalizer_handle, (lines, 2), "float32", align=8)

        T.device_entry()
        line = T.cta_id([lines])
        thread = T.thread_id([THREADS])
        parts = T.alloc_buffer((2 * WARPS,), "float32", scope="shared")
        largest = T.alloc_local([1], "float32")
        total = T.alloc_local([1], "float32")
        other = T.alloc_local([2], "float32")
        last = T.alloc_local([1], "int32")  # key that the row sees
        last[0] = n - rows + T.truncmod(line, rows)
        largest[0] = T.float32(LEAST)
        total[0] = T.float32(0)
        for step in T.serial(T.truncdiv(n + (AT_ONCE * THREADS - 1), AT_ONCE * THREADS)):
            first = T.meta_var(step * (AT_ONCE * THREADS))
            if first + AT_ONCE * THREADS <= last[0] + 1:
                add(True, largest, total, products, T.cast(line, "int64"), first + thread, last[0], n, scale)
            else:
                add(False, largest, total, products, T.cast(line, "int64"), first + thread, last[0], n, scale)
        for bit in T.unroll(5):
            other[0] = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), largest[0], 1 << bit, WARP, WARP)
            other[1] = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[0], 1 << bit, WARP, WARP)
            merge(largest, total, other[0], other[1])
        if thread % WARP == 0:
            parts[2 * (thread // WARP)] = largest[0]
            parts[2 * (thread // WARP) + 1] = total[0]
        T.cuda.cta_sync()
        if thread == 0:
            for warp in T.unroll(WARPS - 1):
                merge(largest, total, parts[2 * warp + 2], parts[2 * warp + 3])
            normalizer[line, 0] = largest[0]
            normalizer[line, 1] = T.float32(1) / total[0]

    return finished(kernel, "normalizers_of_last", [])


@functools.cache
def sums() -> tvm.tirx.PrimFunc:
    """The second kernel; arguments products, normalizer, by_key, by_distance, rows, scale.

    products, normalizer, rows, scale
        As the first kernel has them.
    by_key : float32 (heads, n)
        The sums of the weights of all rows of a head, for each key.
    by_distance : float32 (heads, n)
        The same for each distance from 0 on between a row's place, n - rows + r, and a key before it.
    """

    @T.inline
    def add(all_seen, key_sums, distance_sums, products, normalizer, head, first_row, first, rows, n, scale):
        """Joins the weights of ROWS_AT_ONCE rows; past an end the last row or product is read again, and not summed."""
        straight = T.alloc_local([KEYS * ROWS_AT_ONCE], "float32")
        skewed = T.alloc_local([KEYS * ROWS_AT_ONCE], "float32")
        of_row = T.alloc_local([2 * ROWS_AT_ONCE], "float32")
        for r in T.unroll(ROWS_AT_ONCE):
            row = T.meta_var(at_most(all_seen, first_row + r, rows - 1))
            line = T.meta_var(T.cast(head * rows + row, "int64"))
            of_row[2 * r] = normalizer[line, 0]
            of_row[2 * r + 1] = normalizer[line, 1]
            for i in T.unroll(KEYS):
                key = T.meta_var(at_most(all_seen, first + i * THREADS, n - 1))
                straight[KEYS * r + i] = products[line, key]
                # Row r has distance d at key n - rows + r - d.  Here that is n - 1 - d, of row 0 earlier: the keys of
                # other rows follow one another, and are mostly those that the thread's neighbours sum by key.
                place = T.meta_var(key - (rows - 1) + row)
                skewed[KEYS * r + i] = products[line, place if all_seen else T.max(place, 0)]
        for r in T.unroll(ROWS_AT_ONCE):
            row = T.meta_var(first_row + r)
            for i in T.unroll(KEYS):
                key = T.meta_var(first + i * THREADS)
                is_seen = T.meta_var(key <= n - rows + row)
                has_distance = T.meta_var(key - (rows - 1) + row >= 0)
                of_key = T.meta_var(exponent(straight[KEYS * r + i], scale, of_row[2 * r], all_seen, is_seen))
                of_distance = T.meta_var(exponent(skewed[KEYS * r + i], scale, of_row[2 * r], True, True))
                share = T.meta_var(of_row[2 * r + 1])
                key_sums[i] = key_sums[i] + only(all_seen, row < rows, T.exp2(of_key) * share)
                distance_sums[i] = distance_sums[i] + only(
                    all_seen, T.And(row < rows, has_distance), T.exp2(of_distance) * share
                )

    @T.jit(private=True)
    def kernel(
        products_handle: T.handle,
        normalizer_handle: T.handle,
        key_handle: T.handle,
        distance_handle: T.handle,
        rows: T.int32,
        scale: T.float32,
    ):
        lines = T.int32()
        heads = T.int32()
        n = T.int32()
        products = T.match_buffer(products_handle, (lines, n), "float32")
        normalizer = T.match_buffer(normalizer_handle, (lines, 2), "float32", align=8)
        by_key = T.match_buffer(key_handle, (heads, n), "float32")
        by_distance = T.match_buffer(distance_handle, (heads, n), "float32")

        T.device_entry()
        cta = T.cta_id([heads * T.truncdiv(n + (KEYS * THREADS - 1), KEYS * THREADS)])
        thread = T.thread_id([THREADS])
        head = T.alloc_local([1], "int32")
        first = T.alloc_local([1], "int32")
        key_sums = T.alloc_local([KEYS], "float32")
        distance_sums = T.alloc_local([KEYS], "float32")
        head[0] = T.truncmod(cta, heads)
        first[0] = T.truncdiv(cta, heads) * (KEYS * THREADS) + thread
        begin = T.meta_var(first[0] - thread)
        is_inner = T.meta_var(T.And(begin >= rows - 1, begin + KEYS * THREADS <= n - rows + 1))
        for i in T.unroll(KEYS):
            key_sums[i] = T.float32(0)
            distance_sums[i] = T.float32(0)
        for step in T.serial(T.truncdiv(rows + (ROWS_AT_ONCE - 1), ROWS_AT_ONCE)):
            row = T.meta_var(step * ROWS_AT_ONCE)
            if T.And(is_inner, row + ROWS_AT_ONCE <= rows):
                add(True, key_sums, distance_sums, products, normalizer, head[0], row, first[0], rows, n, scale)
            else:
                add(False, key_sums, distance_sums, products, normalizer, head[0], row, first[0], rows, n, scale)
        for i in T.unroll(KEYS):
            if first[0] + i * THREADS < n:
                by_key[head[0], first[0] + i * THREADS] = key_sums[i]
                by_distance[head[0], n - 1 - (first[0] + i * THREADS)] = distance_sums[i]

    return finished(kernel, "sums_of_last", [])


def exponent(product, scale, offset, all_seen, is_seen):
    """The exponent of 2 of a product's weight, less `offset`; -inf where a key isn't seen, and NaN wherever there is.

    Product and difference are one FMA in both kernels, so that a rounded offset cancels.
    """
    found = product * (scale * T.float32(math.log2(math.e))) - offset
    unseen = T.reinterpret("float32", T.uint32(MINUS_INFINITY))
    return found if all_seen else found + T.Select(is_seen, T.float32(0), unseen)


def at_most(is_less, x, most):
    """x, which may be known to be less, or `most`."""
    return x if is_less else T.min(x, most)


def only(always, condition, x):
    """x where a condition holds, which may be known to, else 0."""
    return x if always else T.Select(condition, x, T.float32(0))
