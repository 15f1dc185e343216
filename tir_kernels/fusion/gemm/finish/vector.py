"""Device code of the CUDA matrix-product kernels for vectors of 8 sums: norm, steps, rounding, statistics, stores."""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.fusion.gemm.finish.deferred_norm import correct, first_step_operand, load_pair, measure
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.problem import STATISTICS_COLUMNS
from tir_kernels.fusion.steps import VECTOR, Words, step_functions, store_vector

MOST_MEASURED = 4  # vectors of a lane, whose statistics are summed over the lanes at the same time


def vector_functions(g: GemmGeometry):
    """Functions that finish a thread's vectors of sums, in registers or in shared memory.

    exists(row, column)           whether a vector is in the product
    takes_part(row, column)       whether its thread calls `apply`: for statistics, all threads of a warp do
    apply(values, row_words, words, at, pair_address, norm_words)     apply the norm and the steps
    store(values, out, row, column)                                   store a vector, if no statistics are wanted
    store_measured(values, count, out, statistics, position)          store `count` vectors and their statistics

    Vector i of `store_measured` is at (row, column) = position(i).  `steps` are the `step_functions`, which explain
    `row_words` and words[at…].  With a deferred norm, `pair_address` is the shared address of a row's scale and shift,
    and `norm_words` is what `norm_columns` fetched.
    """
    problem = g.problem
    steps = step_functions(problem.steps, problem.dtype, first_step_operand(problem))
    store_values = store_vector(problem.dtype)

    def exists(row, column):
        conditions = [row < problem.m] * g.m_ends + [column < problem.n] * g.n_ends
        return T.And(*conditions) if len(conditions) == 2 else conditions[0] if conditions else True

    def takes_part(row, column):
        return True if problem.statistics else exists(row, column)

    @T.inline
    def apply(values, row_words, words, at, pair_address=None, norm_words=None):
        if problem.row_norm is not None:
            pair = T.alloc_local([2], "float32")
            load_pair(pair, pair_address)
        else:
            pair = T.meta_var(None)
        if problem.a_norm is not None:
            correct(values, pair, norm_words)
        steps.apply(values, row_words, words, at, pair, norm_words)

    @T.inline
    def store(values, out, row, column):
        if problem.n % VECTOR == 0:
            store_values(lambda i: out.ptr_to([row, column + i]), values)
        else:  # rows begin anywhere, and the last vector of one ends past it
            for i in T.unroll(VECTOR):
                if column + i < problem.n:
                    out[row, column + i] = T.cast(values[i], problem.dtype)

    @T.inline
    def store_measured(values, count, out, statistics, position):
        means = T.alloc_local([count], "float32")
        squares = T.alloc_local([count], "float32")
        measure(means, squares, values, count)
        for i in T.unroll(count):
            row, column = T.meta_var(position(i))
            if exists(row, column):
                store_values(lambda j: out.ptr_to([row, column + j]), Words(values, i * VECTOR))
                if column % STATISTICS_COLUMNS == 0:
                    T.ptx["st.global.v2.f32"](
                        statistics.ptr_to([row, column // STATISTICS_COLUMNS, 0]), means[i], squares[i]
                    )

    return SimpleNamespace(
        exists=exists, takes_part=takes_part, apply=apply, store=store, store_measured=store_measured, steps=steps
    )
