"""Device code that finishes a product's tile where its accumulators are, if no step needs more than a column's number.

The steps see all accumulators of a warp at once, without a branch or a wait between them: a warp that takes its rows
through shared memory as float32, a few at a time, and then applies the steps, waits for each part of them.  Only
rounded results go through shared memory, to become whole vectors of a row.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import MMA_COLS, MMA_ROWS
from tir_kernels.fusion.gemm.finish.deferred_norm import first_step_operand
from tir_kernels.fusion.gemm.finish.gated import gated_products
from tir_kernels.fusion.gemm.finish.vector import vector_functions
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.steps import VECTOR, Words, load_words, step_functions

WORDS = VECTOR // 2  # of neighbouring accumulators in two rows and two n8 tiles, which are finished as one vector


def register_epilogue(g: GemmGeometry):
    """Functions with the arguments of `staged_epilogue`'s; there are no statistics and no norms.

    begin(row_words, operands, thread, row, column, …)                 start to load operands, before the product
    store(acc, base, thread, row_words, operands, out, row, column, …)          steps and stores

    A lane has two neighbouring columns of each n8 tile, so it loads a word of each operand for each tile.
    """
    problem = g.problem
    steps = step_functions(problem.steps, problem.dtype, first_step_operand(problem))
    exists, gated = vector_functions(g).exists, gated_products(g)
    load_vectors = load_words(problem.steps, "row", first_step_operand(problem))
    pack = "cvt.rn.bf16x2.f32" if problem.dtype == "bfloat16" else "cvt.rn.f16x2.f32"
    columns, parts, pitch = g.staging_columns, g.column_parts, g.rounded_pitch
    part_pairs = columns // (2 * MMA_COLS)

    def first_of(first_column, thread):
        return (first_column + g.warp_column(thread // 32)) // g.columns_each

    @T.inline
    def begin(row_words, operands, thread, first_row, first_column, kept=None, normed=None):
        if steps.row_size > 0:
            for tile in T.unroll(g.out_col_tiles):
                column = T.meta_var(first_of(first_column, thread) + tile * MMA_COLS + thread % 4 * 2)
                at = T.meta_var(tile // 2 * steps.row_size + tile % 2)
                if exists(0, column):
                    load_vectors(row_words, at, operands, lambda x, column=column: x.ptr_to([column]))
            for i in T.unroll(g.out_col_tiles // 2 * steps.row_size // 2):  # a lane's other row has the same words
                row_words[i // 2 * 4 + i % 2 + 2] = row_words[i // 2 * 4 + i % 2]

    @T.inline
    def meanwhile(operands, thread, first_row, kept, normed):
        pass

    @T.inline
    def finish(packed, acc, m, pair, row_words):
        """Apply the steps to a lane's accumulators in two n8 tiles, and round them: a word a row and tile."""
        values = T.alloc_local([VECTOR], "float32")
        first = T.meta_var((m * g.col_tiles + 2 * pair) * 4)
        for i in T.unroll(VECTOR):
            values[i] = acc[first + i // 2 % 2 * 4 + i // 4 * 2 + i % 2]
        steps.apply(values, Words(row_words, pair * steps.row_size), None, 0)
        for i in T.unroll(WORDS):
            T.ptx[pack](packed[pair % part_pairs * WORDS + i], values[2 * i + 1], values[2 * i])

    @T.inline
    def store(
        acc, base, thread, row_words, operands, out, first_row, first_column, statistics=None, kept=None, normed=None
    ):
        if problem.gate is not None:
            gated(acc, operands, first_column + g.warp_column(thread // 32) + thread % 4 * 2)
        packed = T.alloc_local([part_pairs * WORDS], "uint32")
        words = T.alloc_local([WORDS], "uint32")
        lane = T.meta_var(thread % 32)
        staging = base + g.staging_offset + thread // 32 * g.staging_bytes
        write_address = staging + lane // 4 * pitch + lane % 4 * 4
        read_address = staging + lane // g.row_vectors * pitch + lane % g.row_vectors * 16
        row = T.meta_var(first_row + g.warp_row(thread // 32) + lane // g.row_vectors)
        column = T.meta_var(first_of(first_column, thread) + lane % g.row_vectors * VECTOR)
        for m in T.unroll(g.row_tiles):
            for part in T.unroll(parts):
                for pair in T.unroll(part_pairs):
                    finish(packed, acc, m, part * part_pairs + pair, row_words)
                T.cuda.warp_sync()
                for i in T.unroll(part_pairs * WORDS):
                    at = T.meta_var(i // 2 % 2 * 8 * pitch + (i // 4 * 2 + i % 2) * 16)
                    T.ptx["st.shared.b32"](address(write_address + at), packed[i])
                T.cuda.warp_sync()
                for i in T.unroll(MMA_ROWS // g.rows_per_pass):
                    T.ptx["ld.shared.v4.b32"](
                        words[0], words[1], words[2], words[3], address(read_address + i * g.rows_per_pass * pitch)
                    )
                    at_row = T.meta_var(row + m * g.row_tile_step + i * g.rows_per_pass)
                    at_column = T.meta_var(column + part * columns)
                    if exists(at_row, at_column):
                        T.ptx["st.global.v4.b32"](
                            out.ptr_to([at_row, at_column]), words[0], words[1], words[2], words[3]
                        )

    row_size = g.out_col_tiles // 2 * steps.row_size
    return SimpleNamespace(begin=begin, meanwhile=meanwhile, store=store, row_size=row_size, kept_size=0)
