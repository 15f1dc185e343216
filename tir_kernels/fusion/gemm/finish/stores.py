"""Device code that brings a warp's rounded results from registers to memory, 16 rows of some columns at a time."""

import math

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, ELEMENT_BYTES, MMA_COLS, MMA_ROWS
from tir_kernels.fusion.gemm.finish.vector import vector_functions
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.steps import VECTOR

WORDS = 4  # of a lane in 16 rows of 16 columns: for each half of the rows, one of either n8 tile
# By the elements of a lane's store: what it loads from shared memory and stores, in so many registers of a type.
STORES = {8: (".v4.b32", 4, "uint32"), 4: (".v2.b32", 2, "uint32"), 2: (".b32", 1, "uint32"), 1: (".b16", 1, "uint16")}


def row_stores(g: GemmGeometry):
    """`put(packed, staging, lane, out, row, column)`: store what lanes packed as the accumulators of mma lie.

    All lanes of a warp call it for the box of 16 rows and `staging_columns` from row, column on; `staging` is the
    warp's shared memory.  Rows of a result begin at multiples of as many elements as divide its columns, 8 at most; so
    many a lane stores at once, and neighbours in a row are stored by neighbouring lanes.  Where `g.streams`, results
    pass by the L1 cache.
    """
    exists, pitch, columns = vector_functions(g).exists, g.rounded_pitch, g.staging_columns
    words_each = columns // (2 * MMA_COLS) * WORDS
    each = math.gcd(g.problem.n, VECTOR)
    suffix, registers, kind = STORES[each]
    store = "st.global" + ".L1::no_allocate" * g.streams + suffix
    of_row = columns // each  # stores of a row
    together = min(of_row, 32)  # by different lanes
    rows = 32 // together  # that a warp stores at once

    @T.inline
    def put(packed, staging, lane, out, row, column):
        words = T.alloc_local([registers], kind)
        write_address = staging + lane // 4 * pitch + lane % 4 * 4
        own_row, own_column = T.meta_var((lane // together, lane % together * each))
        read_address = staging + own_row * pitch + own_column * ELEMENT_BYTES
        T.cuda.warp_sync()
        for i in T.unroll(words_each):
            at = T.meta_var(i // 2 % 2 * 8 * pitch + (i // 4 * 2 + i % 2) * CHUNK_BYTES)
            T.ptx["st.shared.b32"](address(write_address + at), packed[i])
        T.cuda.warp_sync()
        for i in T.unroll(MMA_ROWS * of_row // 32):
            next_row = T.meta_var(i // (of_row // together) * rows)
            next_column = T.meta_var(i % (of_row // together) * (together * each))
            T.ptx["ld.shared" + suffix](
                *[words[j] for j in range(registers)],
                address(read_address + next_row * pitch + next_column * ELEMENT_BYTES),
            )
            at_row = T.meta_var(row + own_row + next_row)
            at_column = T.meta_var(column + own_column + next_column)
            if exists(at_row, at_column):
                T.ptx[store](out.ptr_to([at_row, at_column]), *[words[j] for j in range(registers)])

    return put
