"""Device code that normalises the rows of a finished row of tiles: the second phase of a matrix product with a norm."""

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import ALL_LANES, element
from tir_kernels.fusion.gemm.sizes.geometry import NORM_AHEAD, GemmGeometry
from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.steps import VECTOR, load_vector, store_vector

LINE = 64  # elements of a line of the cache


def row_normalization(g: GemmGeometry, norm: Norm):
    """Functions of the second phase, in which a warp normalises whole rows; operands[first] is the norm's first vector.

    prefetch(operands, first, thread)                              prefetch the norm's vectors to the L2 cache
    normalize(source, out, operands, first, thread, first_row)     normalise the rows of one row of tiles

    `source` holds what other CTAs wrote and may be `out` itself.  A warp keeps `norm_rows` rows in registers, so that
    their loads overlap, and reads the norm's vectors `NORM_AHEAD` vectors ahead of their use.
    """
    problem, dtype, warps, together = g.problem, g.problem.dtype, g.config.warps, g.norm_rows
    per_lane, words_of_row = g.norm_vectors, g.norm_vectors * VECTOR // 2
    load, load_constant, store = load_vector(dtype, "cg"), load_vector(dtype), store_vector(dtype)
    rows_of_warp = g.config.block_m // warps
    ends = problem.n % (32 * VECTOR) != 0
    centred = norm.kind == "layer_norm"

    def exists(lane, v):
        """Whether vector v of a lane is inside the row."""
        return (v * 32 + lane) * VECTOR < problem.n

    @T.inline
    def load_row(words, at, source, row, lane):
        for v in T.unroll(per_lane):
            if ends:
                if exists(lane, v):
                    load(words, at + v * 4, lambda i: source.ptr_to([row, (v * 32 + lane) * VECTOR + i]))
                else:
                    for i in T.unroll(4):
                        words[at + v * 4 + i] = T.uint32(0)
            else:
                load(words, at + v * 4, lambda i: source.ptr_to([row, (v * 32 + lane) * VECTOR + i]))

    @T.inline
    def add_lanes(total, r):
        for i in T.unroll(5):
            total[r] = total[r] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[r], 1 << i, 32, 32)

    @T.inline
    def statistics(words, mean, deviation, lane):
        """Compute the mean of each row in registers, and 1 / deviation or 1 / root mean square."""
        for r in T.unroll(together):
            mean[r] = T.float32(0)
            deviation[r] = T.float32(0)
            if centred:
                for i in T.unroll(words_of_row * 2):
                    mean[r] = mean[r] + element(words, r * words_of_row, i, dtype)
                add_lanes(mean, r)
                mean[r] = mean[r] * T.float32(1 / problem.n)
        for r in T.unroll(together):
            for v in T.unroll(per_lane):
                if T.Or(T.bool(not ends), exists(lane, v)):
                    for i in T.unroll(VECTOR):
                        x = T.meta_var(element(words, r * words_of_row + v * 4, i, dtype) - mean[r])
                        deviation[r] = deviation[r] + x * x
            add_lanes(deviation, r)
            deviation[r] = T.rsqrt(deviation[r] * T.float32(1 / problem.n) + T.float32(norm.eps))

    @T.inline
    def normalize_vector(words, at, pair, weight, bias, constants_at, pointer):
        values = T.alloc_local([VECTOR], "float32")
        for i in T.unroll(VECTOR):
            values[i] = element(words, at, i, dtype)
        for i in T.unroll(VECTOR):
            values[i] = (values[i] - pair[0]) * pair[1]
            if norm.weight:
                values[i] = values[i] * element(weight, constants_at, i, dtype)
            if norm.bias:
                values[i] = values[i] + element(bias, constants_at, i, dtype)
        store(pointer, values)

    @T.inline
    def load_constants(weight, bias, operands, first, v, lane):
        at = T.meta_var(v % NORM_AHEAD * 4)
        column = T.meta_var((v * 32 + lane) * VECTOR)
        if T.Or(T.bool(not ends), exists(lane, v)):
            if norm.weight:
                load_constant(weight, at, lambda i: operands[first].ptr_to([column + i]))
            if norm.bias:
                load_constant(bias, at, lambda i: operands[first + norm.weight].ptr_to([column + i]))

    @T.inline
    def normalize_rows(words, mean, deviation, weight, bias, out, operands, first, row, lane):
        pair = T.alloc_local([2], "float32")
        for v in T.unroll(per_lane):
            for r in T.unroll(together):
                if T.And(T.Or(T.bool(not ends), exists(lane, v)), T.Or(T.bool(not g.m_ends), row + r < problem.m)):
                    pair[0] = mean[r]
                    pair[1] = deviation[r]
                    normalize_vector(
                        words,
                        r * words_of_row + v * 4,
                        pair,
                        weight,
                        bias,
                        v % NORM_AHEAD * 4,
                        lambda i: out.ptr_to([row + r, (v * 32 + lane) * VECTOR + i]),
                    )
            if v + NORM_AHEAD < per_lane:
                load_constants(weight, bias, operands, first, v + NORM_AHEAD, lane)

    @T.inline
    def prefetch_vector(vector, thread):
        for i in T.unroll(-(-problem.n // (g.threads * LINE))):
            column = T.meta_var((i * g.threads + thread) * LINE)
            if column < problem.n:
                T.ptx["prefetch.global.L2"](vector.ptr_to([column]))

    @T.inline
    def prefetch(operands, first, thread):
        if norm.weight:
            prefetch_vector(operands[first], thread)
        if norm.bias:
            prefetch_vector(operands[first + norm.weight], thread)

    @T.inline
    def normalize(source, out, operands, first, thread, first_row):
        words = T.alloc_local([together * words_of_row], "uint32")
        mean = T.alloc_local([together], "float32")
        deviation = T.alloc_local([together], "float32")
        weight = T.alloc_local([4 * NORM_AHEAD], "uint32")
        bias = T.alloc_local([4 * NORM_AHEAD], "uint32")
        lane = T.meta_var(thread % 32)
        for i in T.serial(rows_of_warp // together):
            row = first_row + thread // 32 * rows_of_warp + i * together
            for r in T.unroll(together):
                load_row(words, r * words_of_row, source, T.min(row + r, problem.m - 1), lane)
            for v in T.unroll(min(per_lane, NORM_AHEAD)):
                load_constants(weight, bias, operands, first, v, lane)
            statistics(words, mean, deviation, lane)
            normalize_rows(words, mean, deviation, weight, bias, out, operands, first, row, lane)

    return prefetch, normalize
