"""Device code of LayerNorm and RMSNorm on a row that lies in registers.

Squares are summed about the mean of a thread's own elements, then merged with those of other threads and warps.  Two
parts a and b of n elements each are merged by

    sum = sum_a + sum_b        squares = squares_a + squares_b + (sum_a - sum_b)² / 2n

Nothing cancels, whatever the mean, and sum and squares are reduced together, in one round and with one barrier.  Where
threads hold unequal parts of a row, each warp first finds its mean in a separate round.
"""

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda.ptx import ALL_LANES, address, element
from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.rows.geometry import STATISTICS_BYTES, WARP, RowGeometry
from tir_kernels.fusion.steps import VECTOR


def local_buffers(name: str, count: int, size: int, dtype: str) -> list:
    """`count` buffers of `size` registers each."""
    return [IRBuilder.name(f"{name}{i}", T.alloc_local([max(size, 1)], dtype)) for i in range(count)]


def row_statistics(g: RowGeometry, norm: Norm):
    """`statistics(pair, values, row_lane, slot)`: pair = (mean, 1 / deviation), or (0, 1 / root mean square).

    `values` are the buffers of the vectors of the thread at `row_lane` in its row, `slot` is where in shared memory the
    row's statistics go, of which each warp has STATISTICS_BYTES.
    """
    config, warps, centred = g.config, g.warps_per_row, norm.kind == "layer_norm"

    @T.inline
    def assign(buffer, at, value):
        buffer[at] = value

    lanes = min(config.threads_per_row, WARP)
    own = g.vectors_per_thread * VECTOR  # elements of a thread

    def shuffled(x, i):
        return T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), x, 1 << i, WARP, WARP)

    @T.inline
    def sum_lanes(pair, at, value):
        """Set pair[at] to the sum of value over the lanes of a warp that have the same row."""
        pair[at] = value
        for i in T.unroll(lanes.bit_length() - 1):
            pair[at] = pair[at] + shuffled(pair[at], i)

    @T.inline
    def merge_lanes(pair):
        """Merge the sums and squares of each thread to those of the warp."""
        other = T.alloc_local([2], "float32")
        for i in T.unroll(lanes.bit_length() - 1):
            other[0] = shuffled(pair[0], i)
            other[1] = shuffled(pair[1], i)
            pair[1] = (
                pair[1] + other[1] + square(pair[0] - other[0]) * (T.float32(0.5 / own) / T.cast(1 << i, "float32"))
            )
            pair[0] = pair[0] + other[0]

    @T.inline
    def exchange(pair, row_lane, slot, sums, squares):
        """Pass the values of each warp of the row to all of its warps."""
        if row_lane % WARP == 0:
            T.ptx["st.shared.v2.f32"](address(slot + row_lane // WARP * STATISTICS_BYTES), pair[0], pair[1])
        T.cuda.cta_sync()
        for w in T.unroll(warps):
            T.ptx["ld.shared.v2.f32"](sums[w], squares[w], address(slot + w * STATISTICS_BYTES))

    def total(values, row_lane, term):
        """The sum of term(x) over the thread's elements x, of vectors that exist."""
        terms = []
        for v, vector in enumerate(values):
            some = tree([term(vector[i]) for i in range(VECTOR)])
            if not g.always_inside(v):
                some = T.Select(row_lane < g.vectors - v * config.threads_per_row, some, T.float32(0))
            terms.append(some)
        return tree(terms)

    def statistics(pair, values, row_lane, slot):
        (mean,) = local_buffers("mean", 1, 1, "float32")
        assign(pair, 0, T.float32(0))
        if not centred:
            sum_lanes(pair, 1, total(values, row_lane, square))
        elif g.vectors % config.threads_per_row == 0:
            assign(pair, 0, total(values, row_lane, lambda x: x))
            assign(mean, 0, pair[0] * T.float32(1 / own))
            assign(pair, 1, total(values, row_lane, lambda x: square(x - mean[0])))
            merge_lanes(pair)
        else:
            sum_lanes(pair, 0, total(values, row_lane, lambda x: x))
            assign(mean, 0, pair[0] / T.cast(g.elements_of_warp(row_lane // WARP), "float32"))
            sum_lanes(pair, 1, total(values, row_lane, lambda x: square(x - mean[0])))
        if warps > 1:
            merge_warps(pair, row_lane, slot)
        if centred:
            assign(pair, 0, pair[0] * T.float32(1 / g.n))
        assign(pair, 1, T.rsqrt(pair[1] * T.float32(1 / g.n) + T.float32(norm.eps)))

    def merge_warps(pair, row_lane, slot):
        """Merge the sums and squares of each warp to those of the row."""
        sums, squares = (local_buffers(name, 1, warps, "float32")[0] for name in ("sums", "squares"))
        (mean,) = local_buffers("row_mean", 1, 1, "float32")
        exchange(pair, row_lane, slot, sums, squares)
        assign(pair, 0, tree([sums[w] for w in range(warps)]))
        terms = [squares[w] for w in range(warps)]
        if centred:
            assign(mean, 0, pair[0] * T.float32(1 / g.n))
            for w, count in enumerate(g.elements_of_warp(w) for w in range(warps)):
                terms[w] = terms[w] + T.float32(count) * square(sums[w] * T.float32(1 / count) - mean[0])
        assign(pair, 1, tree(terms))

    return statistics


def row_scaling(norm: Norm, dtype: str):
    """`scale(values, pair, weight_words, bias_words)`: normalise a vector by the row's statistics, in place."""

    @T.inline
    def scale(values, pair, weight_words, bias_words):
        for i in T.unroll(VECTOR):
            if norm.kind == "layer_norm":
                values[i] = (values[i] - pair[0]) * pair[1]
            else:
                values[i] = values[i] * pair[1]
            if norm.weight:
                values[i] = values[i] * element(weight_words, 0, i, dtype)
            if norm.bias:
                values[i] = values[i] + element(bias_words, 0, i, dtype)

    return scale


def square(x):
    """x², of a number or an expression."""
    return x * x


def tree(terms: list):
    """The sum of terms, added in pairs: a short chain of additions."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2])] + terms[len(terms) // 2 * 2 :]
    return terms[0]
