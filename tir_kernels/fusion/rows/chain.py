"""An elementwise chain without a norm on CUDA (sm_80 and up): gates, residual sums, and all that no epilogue takes.

The kernel is bound by memory: every thread works on vectors of 8 neighbours and starts to load all operands before it
uses the first.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished
from tir_kernels.fusion.problem import GemmProblem, RowProblem
from tir_kernels.fusion.rows.cost import predict_row_us
from tir_kernels.fusion.rows.device import decode_vector
from tir_kernels.fusion.rows.geometry import MAX_INT32, steps_refusal
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import VECTOR, load_vector, match_operands, step_functions, store_vector, vector_words
from tir_kernels.template import Operands

NAME = "row-chain"
TARGET_KIND = "cuda"
MAX_OPERANDS = 6


@dataclass(frozen=True)
class ChainConfig:
    """Threads of a CTA, and vectors of each thread."""

    threads: int
    vectors_per_thread: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "256 threads 1 vectors"."""
        return f"{self.threads} threads {self.vectors_per_thread} vectors"


Config = ChainConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, RowProblem) or isinstance(problem, GemmProblem):
        return "it is no elementwise chain on a matrix"
    if problem.norm is not None:
        return f"{problem.norm.kind} needs whole rows: the row-norm kernel has them"
    if problem.n % VECTOR:
        return f"n={problem.n} must be a multiple of {VECTOR}: rows are read 16 bytes at a time"
    if problem.m * problem.n > MAX_INT32:
        return f"{problem.m} rows of {problem.n} are 2^31 elements or more; indices are 32-bit"
    return steps_refusal(problem, MAX_OPERANDS)


def configs(problem: RowProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration; the default first."""
    # One vector a thread was the fastest at every size on an H200.
    return [Config(threads, per_thread) for per_thread in (1, 2) for threads in (256, 128)]


def predict_us(problem: RowProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    return predict_row_us(problem, target)


def operands(problem: RowProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: RowProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments x, the steps' operands, out."""
    shape, dtype = (problem.m, problem.n), problem.dtype
    steps, words = step_functions(problem.steps, dtype), vector_words(dtype)
    load, store, decode = load_vector(dtype), store_vector(dtype), decode_vector(dtype)
    row_vectors, per_thread = problem.n // VECTOR, config.vectors_per_thread
    vectors = problem.m * row_vectors
    ctas = -(-vectors // (config.threads * per_thread))
    ends = ctas * config.threads * per_thread != vectors

    @T.inline
    def store_where(condition, pointer, values):
        if condition:
            store(pointer, values)

    def work(x, operands, out, first):
        """Compute vectors first, first + threads, …; for those past the end, read the last one and write nothing."""
        buffers = [
            local_buffers(name, per_thread, size, kind)
            for name, size, kind in (
                ("words", words, "uint32"),
                ("row_words", steps.row_size, "uint32"),
                ("matrix_words", steps.matrix_size, "uint32"),
                ("values", VECTOR, "float32"),
            )
        ]
        indices = [first + i * config.threads for i in range(per_thread)]
        for index, source, row_words, matrix_words, _ in zip(indices, *buffers):
            vector = T.min(index, vectors - 1) if ends else index
            row, column = vector // row_vectors, vector % row_vectors * VECTOR
            load(source, 0, lambda i: x.ptr_to([row, column + i]))
            steps.fetch_matrices(matrix_words, 0, operands, row, column)
            steps.fetch_rows(row_words, operands, column)
        for index, source, row_words, matrix_words, values in zip(indices, *buffers):
            decode(values, source)
            steps.apply(values, row_words, matrix_words, 0)
            pointer = lambda i: out.ptr_to([index // row_vectors, index % row_vectors * VECTOR + i])
            if ends:
                store_where(index < vectors, pointer, values)
            else:
                store(pointer, values)

    @T.jit(private=True)
    def kernel(
        x_handle: T.handle,
        handle0: T.Optional(T.handle),
        handle1: T.Optional(T.handle),
        handle2: T.Optional(T.handle),
        handle3: T.Optional(T.handle),
        handle4: T.Optional(T.handle),
        handle5: T.Optional(T.handle),
        out_handle: T.handle,
    ):
        x = T.match_buffer(x_handle, shape, dtype, align=16)
        operands = T.meta_var(match_operands((handle0, handle1, handle2, handle3, handle4, handle5), problem.operands))
        out = T.match_buffer(out_handle, shape, dtype, align=16)

        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([config.threads])
        first = cta * (config.threads * per_thread) + thread
        work(x, operands, out, first)

    absent = [f"handle{i}" for i in range(len(problem.operands), MAX_OPERANDS)]
    return finished(kernel, f"row_chain_{config.threads}x{per_thread}", absent)
