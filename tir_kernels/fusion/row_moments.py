"""Device code for moments of rows: what a norm needs to know of a row, given by one product and used by the next.

A norm between two products needs whole rows, of which a tile has parts, and as a kernel of its own reads and writes
everything once more.  But normalising the rows of a and multiplying by w is multiplying a by w, with the norm's weight
and the mean's subtraction folded into w, and then each row by one number.  So the product that makes a also writes the
mean and the sum of squared differences of every 64 columns, and the next one puts those of a row together, as Chan,
Golub and LeVeque do, and needs no more of the norm.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.cuda_geometry import MMA_ROWS
from tir_kernels.attention.cuda_softmax import ALL_LANES
from tir_kernels.attention.cuda_tile import address
from tir_kernels.fusion.gemm_geometry import PAIR_BYTES, GemmGeometry
from tir_kernels.fusion.problem import MOMENT_COLUMNS
from tir_kernels.fusion.steps_cuda import VECTOR

GROUP = MOMENT_COLUMNS // VECTOR  # lanes that work on the columns of one part


def moments_reader(g: GemmGeometry):
    """From the moments of a warp's rows to a pair of each row, its mean and 1 / sqrt(variance + eps), in shared memory.

    load(words, moments, thread, first_row)        on their way, to `size` registers
    place(words, pairs, thread)                    pairs: the address of the warp's; other lanes see them afterwards
    fetch(words, at, pairs, row)                   the pair of a warp's row, counted from 0, to two registers
    """
    problem = g.problem
    parts, eps = problem.moments_shape[1], problem.moments_step.value
    turns = -(-g.row_tiles * MMA_ROWS // 32)  # of a warp's lanes, one row each

    def row_in_tile(thread, turn):
        row = turn * 32 + thread % 32
        of_tile = g.row_tiles * MMA_ROWS
        row = row if of_tile % 32 == 0 else row % of_tile  # of a few rows each is two lanes'
        return row // MMA_ROWS * g.row_tile_step + row % MMA_ROWS, row

    @T.inline
    def load(words, moments, thread, first_row):
        for turn in T.unroll(turns):
            row = T.meta_var(first_row + g.warp_row(thread // 32) + row_in_tile(thread, turn)[0])
            existing = T.meta_var(T.min(row, problem.m - 1) if g.m_ends else row)
            for part in T.unroll(parts):
                at = T.meta_var((turn * parts + part) * 2)
                T.ptx["ld.global.cg.v2.f32"](words[at], words[at + 1], moments.ptr_to([existing, part, 0]))

    @T.inline
    def place(words, pairs, thread):
        pair = T.alloc_local([2], "float32")
        for turn in T.unroll(turns):
            pair[0] = T.float32(0)
            pair[1] = T.float32(0)
            for part in T.unroll(parts):
                pair[0] = pair[0] + words[(turn * parts + part) * 2]
            pair[0] = pair[0] * T.float32(1 / parts)
            for part in T.unroll(parts):
                at = T.meta_var((turn * parts + part) * 2)
                away = T.meta_var(words[at] - pair[0])
                pair[1] = pair[1] + words[at + 1] + T.float32(MOMENT_COLUMNS) * away * away
            pair[1] = T.rsqrt(pair[1] * T.float32(1 / (parts * MOMENT_COLUMNS)) + T.float32(eps))
            T.ptx["st.shared.v2.f32"](address(pairs + row_in_tile(thread, turn)[1] * PAIR_BYTES), pair[0], pair[1])
        T.cuda.warp_sync()

    @T.inline
    def fetch(words, at, pairs, row):
        T.ptx["ld.shared.v2.b32"](words[at], words[at + 1], address(pairs + row * PAIR_BYTES))

    return SimpleNamespace(load=load, place=place, fetch=fetch, size=2 * turns * parts)


def moments_writer(g: GemmGeometry):
    """`write(values, moments, row, column, lane, exists)`: of 64 columns, which 8 lanes have together.

    All lanes of a warp come here, those of rows or columns that do not exist with `exists` false.
    """
    centred = g.problem.gives_moments == "layer_norm"

    @T.inline
    def add_lanes(total):
        for i in T.unroll(3):
            total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[0], 1 << i, 32, 32)

    @T.inline
    def write(values, moments, row, column, lane, exists):
        mean = T.alloc_local([1], "float32")
        squares = T.alloc_local([1], "float32")
        mean[0] = T.float32(0)
        squares[0] = T.float32(0)
        if centred:
            for i in T.unroll(VECTOR):
                mean[0] = mean[0] + values[i]
            add_lanes(mean)
            mean[0] = mean[0] * T.float32(1 / MOMENT_COLUMNS)
        for i in T.unroll(VECTOR):
            squares[0] = squares[0] + (values[i] - mean[0]) * (values[i] - mean[0])
        add_lanes(squares)
        if T.And(T.bool(True) if exists is True else exists, lane % GROUP == 0):
            T.ptx["st.global.v2.f32"](moments.ptr_to([row, column // MOMENT_COLUMNS, 0]), mean[0], squares[0])

    return write
