"""Device code of the CUDA row kernels: a thread's vectors of a row, their operands, the norm and the stores.

Plain functions here run while a kernel is parsed and write out the code of each vector.  Threads whose row or vector
does not exist read the last one that does, and write nothing.
"""

from types import SimpleNamespace

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda.prologue import scalar, shared_memory
from tir_kernels.cuda.ptx import element
from tir_kernels.fusion.problem import RowProblem
from tir_kernels.fusion.rows.geometry import RowGeometry
from tir_kernels.fusion.rows.statistics import local_buffers, row_scaling, row_statistics
from tir_kernels.fusion.steps import VECTOR, load_vector, step_functions, store_vector, vector_words


def decode_vector(dtype: str):
    """`decode(values, words)`: convert a vector to float32."""

    @T.inline
    def decode(values, words):
        for i in T.unroll(VECTOR):
            values[i] = element(words, 0, i, dtype)

    return decode


def vector_loads(g: RowGeometry, dtype: str):
    """`load_row(words, buffer, row, row_lane)` and `load_constant(words, buffer, row_lane)`.

    They load a row of a matrix, or a vector (n,), to `words[v]` for each vector v of a thread.
    """
    load = load_vector(dtype)

    def load_row(words, buffer, row, row_lane):
        for v in range(g.vectors_per_thread):
            column = g.column(v, row_lane)
            load(words[v], 0, lambda i: buffer.ptr_to([row, column + i]))

    def load_constant(words, buffer, row_lane):
        for v in range(g.vectors_per_thread):
            column = g.column(v, row_lane)
            load(words[v], 0, lambda i: buffer.ptr_to([column + i]))

    return load_row, load_constant


def row_of_thread(g: RowGeometry) -> tuple:
    """(row, row to read, lane of the row, address of the row's slot in shared memory) of a thread of the kernel."""
    cta = IRBuilder.name("cta", T.cta_id([g.ctas]))
    thread = IRBuilder.name("thread", T.thread_id([g.threads]))
    row_lane, group = thread % g.config.threads_per_row, thread // g.config.threads_per_row
    base = shared_memory(g.shared_bytes, align=16)
    row = scalar("row", cta * g.config.rows_per_cta + group)
    return row, T.min(row, g.m - 1) if g.rows_end else row, row_lane, base + group * g.row_bytes


def row_work(g: RowGeometry, problem: RowProblem):
    """Functions that compute a row whose source is in registers, for thread `row_lane` of those that share the row.

    registers()                                      allocate all buffers, `r`; r.values are the vectors, float32
    fetch(r, operands, row, row_lane)                load the operands of the steps and of the norm
    apply(r)                                         apply the steps
    finish(r, row, row_lane, slot, out, out_sum)     store the sum, apply the norm, if any, and store the output
    """
    dtype, norm = problem.dtype, problem.norm
    steps = step_functions(problem.steps, dtype)
    words = vector_words(dtype)
    _, load_constant = vector_loads(g, dtype)
    store = store_vector(dtype)
    n_step_operands = sum(step.operand is not None for step in problem.steps)
    norm_operands = [name for name in ("weight", "bias") if getattr(norm, name, False)]
    normalize = None if norm is None else (row_statistics(g, norm), row_scaling(norm, dtype))

    @T.inline
    def store_where(condition, pointer, values):
        if condition:
            store(pointer, values)

    def registers():
        sizes = {
            "values": (VECTOR, "float32"),
            "row_words": (steps.row_size, "uint32"),
            "matrix_words": (steps.matrix_size, "uint32"),
            "weight": (words, "uint32"),
            "bias": (words, "uint32"),
        }
        buffers = {name: local_buffers(name, g.vectors_per_thread, *size) for name, size in sizes.items()}
        return SimpleNamespace(**buffers, pair=IRBuilder.name("pair", T.alloc_local([2], "float32")))

    def fetch(r, operands, row, row_lane):
        for v in range(g.vectors_per_thread):
            steps.fetch_matrices(r.matrix_words[v], 0, operands, row, g.column(v, row_lane))
        for v in range(g.vectors_per_thread):
            steps.fetch_rows(r.row_words[v], operands, g.column(v, row_lane))
        for i, name in enumerate(norm_operands):
            load_constant(getattr(r, name), operands[n_step_operands + i], row_lane)

    def apply(r):
        for v in range(g.vectors_per_thread):
            steps.apply(r.values[v], r.row_words[v], r.matrix_words[v], 0)

    def store_row(r, row, row_lane, buffer):
        for v in range(g.vectors_per_thread):
            vector = row_lane + v * g.config.threads_per_row
            conditions = [row < g.m] * g.rows_end + [vector < g.vectors] * (not g.always_inside(v))
            pointer = lambda i, vector=vector: buffer.ptr_to([row, vector * VECTOR + i])
            if conditions:
                store_where(T.And(*conditions) if len(conditions) == 2 else conditions[0], pointer, r.values[v])
            else:
                store(pointer, r.values[v])

    def finish(r, row, row_lane, slot, out, out_sum):
        if problem.keeps_sum:
            store_row(r, row, row_lane, out_sum)
        if normalize is not None:
            statistics, scale = normalize
            statistics(r.pair, r.values, row_lane, slot)
            for v in range(g.vectors_per_thread):
                scale(r.values[v], r.pair, r.weight[v], r.bias[v])
        store_row(r, row, row_lane, out)

    return SimpleNamespace(registers=registers, fetch=fetch, apply=apply, finish=finish)
