"""Device code that finishes a product's tile where its accumulators are, if no step needs more than a column's number.

The steps see a lane's accumulators of a part of the columns, without a branch or a wait between them: a warp that takes
its rows through shared memory as float32, a few at a time, and then applies the steps, waits for each part of them.
Only rounded results go through shared memory, to become whole vectors of a row.
"""

from collections.abc import Iterable
from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES, MMA_COLS
from tir_kernels.fusion.gemm.finish.deferred_norm import first_step_operand
from tir_kernels.fusion.gemm.finish.stores import WORDS, row_stores
from tir_kernels.fusion.gemm.finish.vector import vector_functions
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.steps import VECTOR, Words, load_words, step_functions

LINE_BYTES = 128  # of the L1 cache


def register_epilogue(g: GemmGeometry):
    """Functions with the arguments of `staged_epilogue`'s; there is no gate, no norm, and no statistics are wanted.

    begin(row_words, operands, thread, row, column, …)                 prefetch operands, before the product
    store(acc, base, thread, row_words, operands, out, row, column, …)          steps and stores

    A lane has two neighbouring columns of each n8 tile, so it loads a word of each operand for each tile.  It does so
    when it needs them: beside the accumulators there are no registers for the words of all tiles.
    """
    problem = g.problem
    first_operand = first_step_operand(problem)
    steps = step_functions(problem.steps, problem.dtype, first_operand)
    exists = vector_functions(g).exists
    load_vectors = load_words(problem.steps, "row", first_operand)
    vectors = range(first_operand, first_operand + sum(step.operand == "row" for step in problem.steps))
    prefetch = _prefetch(vectors)
    pack = "cvt.rn.bf16x2.f32" if problem.dtype == "bfloat16" else "cvt.rn.f16x2.f32"
    columns, parts, put = g.staging_columns, g.column_parts, row_stores(g)
    pairs = columns // (2 * MMA_COLS)  # of n8 tiles in a part
    line = LINE_BYTES // ELEMENT_BYTES

    def first_of(first_column, thread):
        return first_column + g.warp_column(thread // 32)

    @T.inline
    def begin(row_words, operands, thread, first_row, first_column, kept=None, normed=None):
        if len(vectors) > 0:
            column = first_of(first_column, thread) + thread % 32 * line
            if thread % 32 * line < g.warp_n:
                if exists(0, column):
                    prefetch(operands, column)

    @T.inline
    def meanwhile(operands, thread, first_row, kept, normed):
        pass

    @T.inline
    def fetch(words, operands, column):
        """Load the operands of a part's columns; `column` is the lane's first one."""
        for tile in T.unroll(2 * pairs):
            at = T.meta_var(tile // 2 * steps.row_size + tile % 2)
            if exists(0, column + tile * MMA_COLS):
                load_vectors(words, at, operands, lambda x, tile=tile: x.ptr_to([column + tile * MMA_COLS]))
            for i in T.unroll(steps.row_size // WORDS):  # a lane's other row has the same words
                words[at + i * WORDS + 2] = words[at + i * WORDS]

    @T.inline
    def finish(packed, acc, first, words):
        """Apply the steps to a lane's accumulators in two n8 tiles, and round them: a word a row and tile."""
        values = T.alloc_local([VECTOR], "float32")
        for i in T.unroll(VECTOR):
            values[i] = acc[first + i // 2 % 2 * 4 + i // 4 * 2 + i % 2]
        steps.apply(values, words, None, 0)
        for i in T.unroll(WORDS):
            T.ptx[pack](packed[i], values[2 * i + 1], values[2 * i])

    @T.inline
    def store(
        acc, base, thread, row_words, operands, out, first_row, first_column, statistics=None, kept=None, normed=None
    ):
        vector_words = T.alloc_local([max(pairs * steps.row_size, 1)], "uint32")
        packed = T.alloc_local([pairs * WORDS], "uint32")
        lane = T.meta_var(thread % 32)
        staging = base + g.staging_offset + thread // 32 * g.staging_bytes
        row = first_row + g.warp_row(thread // 32)
        column = first_of(first_column, thread)
        for part in T.unroll(parts):
            if len(vectors) > 0:
                fetch(vector_words, operands, column + part * columns + lane % 4 * 2)
            for m in T.unroll(g.row_tiles):
                for pair in T.unroll(pairs):
                    first = T.meta_var((m * g.col_tiles + 2 * (part * pairs + pair)) * 4)
                    own_words = T.meta_var(Words(vector_words, pair * steps.row_size))
                    finish(Words(packed, pair * WORDS), acc, first, own_words)
                put(packed, staging, lane, out, row + m * g.row_tile_step, column + part * columns)

    return SimpleNamespace(begin=begin, meanwhile=meanwhile, store=store, row_size=0, kept_size=0)


def _prefetch(vectors: Iterable[int]):
    """`prefetch(operands, column)`: prefetch the lines of these operands that hold a column."""

    @T.inline
    def prefetch(operands, column):
        pass

    for operand in vectors:
        prefetch = _then_prefetch(prefetch, operand)
    return prefetch


def _then_prefetch(before, operand: int):
    @T.inline
    def prefetch(operands, column):
        before(operands, column)
        T.ptx["prefetch.global.L1"](operands[operand].ptr_to([column]))

    return prefetch
