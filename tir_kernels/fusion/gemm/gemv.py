"""Matrix product with an epilogue for few rows on CUDA (sm_80 and up): decoding, m from 1 to 16.

The kernel is bound by memory: every weight is read once, from global memory straight to the registers of a tensor-core
fragment, and never passes through shared memory.  A lane reads 16 bytes, 8 neighbours along k, but a fragment needs
pairs at a distance of 8.  The order of elements along k is free as long as a and w have the same order.  So a lane
reads a in the same way, and no element is moved.  The warps of a CTA take turns along k, and their sums are added in
shared memory.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import shared_memory
from tir_kernels.cuda.ptx import SHORT, address
from tir_kernels.cuda.shared_tiles import CHUNK, MMA_COLS, MMA_ROWS
from tir_kernels.fusion.gemm.kernel import MAX_OPERANDS
from tir_kernels.fusion.gemm.sizes.cost import predict_gemv_us
from tir_kernels.fusion.gemm.sizes.geometry import FLOAT_BYTES, refusal
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.fusion.steps import VECTOR, load_vector, match_operands, step_functions, store_vector
from tir_kernels.template import Operands

NAME = "gemv"
TARGET_KIND = "cuda"
MAX_ROWS = MMA_ROWS
UNIT = 4 * CHUNK  # elements along k that the four lanes of a row read together
PAD = 8  # floats at the end of a row of sums: 4 rows then meet 32 different banks


@dataclass(frozen=True)
class GemvConfig:
    """A CTA of `warps` warps owns `columns` columns of the output; a warp reads `unroll` units of k at once."""

    columns: int
    warps: int
    unroll: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "8 columns 8 warps 2 units"."""
        return f"{self.columns} columns {self.warps} warps {self.unroll} units"


Config = GemvConfig
COLUMNS, WARPS, UNROLL = (8, 16, 32), (4, 8, 16), (1, 2, 4, 8)
ENOUGH_CTAS, MANY_CTAS, LONG_K = 1.94, 2.425, 2048  # CTAs for each multiprocessor: 256 and 320 on an H200
MAX_VECTORS = 16  # of weights that a lane has under way


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GemmProblem):
        return "it is not one matrix product"
    if problem.m > MAX_ROWS:
        return f"m={problem.m} is more than {MAX_ROWS} rows: the kernel is for decoding"
    if problem.gate is not None:
        return "the kernel has no gates"
    if problem.n % VECTOR:
        return f"n={problem.n} must be a multiple of {VECTOR}: rows are stored 16 bytes at a time"
    if problem.w_layout != "nk":
        return "w_layout='kn': the kernel reads weights along k"
    if problem.norm is not None:
        return f"{problem.norm.kind} needs whole rows, a CTA has parts of them"
    if problem.defers_norm:
        return "the kernel neither reads nor writes statistics of rows"
    if len(problem.operand_shapes) > MAX_OPERANDS:
        return f"{len(problem.operand_shapes)} operands of steps, more than {MAX_OPERANDS}"
    return refusal(problem)


def configs(problem: GemmProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that leaves no warp without work; the default first.

    The default has the most columns that still give `ENOUGH_CTAS`, and more warps if k is long and there are few CTAs.
    On an H200 (1, 8 and 16 rows, n and k from 768 to 11008) it is within 3 % of the fastest at 14 of 15 problems; 1 row
    with n=4096, k=11008 takes 35 % longer than with 8 columns a CTA.
    """
    candidates = [Config(columns, warps, unroll) for columns in COLUMNS for warps in WARPS for unroll in UNROLL]
    fitting = [c for c in candidates if c.columns // MMA_COLS * c.unroll <= MAX_VECTORS]
    busy = [c for c in fitting if c.warps * c.unroll * UNIT <= problem.k] or [Config(8, 4, 1)]
    enough, many = (int(each * gpu_of(target).multiprocessors) for each in (ENOUGH_CTAS, MANY_CTAS))
    columns = max((x for x in COLUMNS if problem.n >= x * enough), default=COLUMNS[0])
    warps = 16 if problem.k >= LONG_K and n_ctas(problem, Config(columns, 16, 2)) < many else 8
    return sorted(busy, key=lambda c: (c.columns != columns, c.warps != warps, c.unroll != 2))


def predict_us(problem: GemmProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel, whatever the configuration."""
    return predict_gemv_us(problem, gpu_of(target))


def operands(problem: GemmProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def shared_bytes(config: Config) -> int:
    """Bytes of shared memory that the sums of all warps take."""
    return config.warps * MMA_ROWS * (config.columns + PAD) * FLOAT_BYTES


def n_ctas(problem: GemmProblem, config: Config) -> int:
    """CTAs of the grid: one for each `config.columns` columns of the output."""
    return -(-problem.n // config.columns)


def instantiate(problem: GemmProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, the steps' operands, out."""
    m, n, k = problem.m, problem.n, problem.k
    tiles, warps, unroll, pitch = config.columns // MMA_COLS, config.warps, config.unroll, config.columns + PAD
    tall = m > MMA_COLS  # whether the lower half of a fragment has rows
    threads, vectors = 32 * warps, config.columns // VECTOR
    steps = step_functions(problem.steps, problem.dtype)
    load, store = load_vector(problem.dtype), store_vector(problem.dtype)
    mma_instruction = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32".format(SHORT[problem.dtype])
    rounds = -(-k // (UNIT * warps * unroll))
    k_ends, n_ends = k % (UNIT * warps * unroll) != 0, n % config.columns != 0

    @T.inline
    def load_or_zero(words, at, exists, buffer, row, column):
        """Load 16 bytes, or zeros where they do not exist; `exists` is True if they always do."""
        if exists is True:
            load(words, at, lambda i: buffer.ptr_to([row, column + i]))
        else:
            for i in T.unroll(4):
                words[at + i] = T.uint32(0)
            if exists:
                load(words, at, lambda i: buffer.ptr_to([row, column + i]))

    def row_exists(row, column):
        """Whether the row and column are inside a: a fragment may have more rows than a has."""
        conditions = [row < m] * (m % MMA_COLS != 0) + [column < k] * k_ends
        return T.And(*conditions) if len(conditions) == 2 else conditions[0] if conditions else True

    @T.inline
    def multiply(acc, a, w, u):
        for t in T.unroll(tiles):
            for half in T.unroll(2):
                ci = T.meta_var(4 * t)
                ai = T.meta_var(8 * u + 2 * half)
                wi = T.meta_var((u * tiles + t) * 4 + 2 * half)
                T.ptx[mma_instruction](
                    acc[ci], acc[ci + 1], acc[ci + 2], acc[ci + 3],
                    a[ai], a[ai + 4], a[ai + 1], a[ai + 5], w[wi], w[wi + 1],
                    acc[ci], acc[ci + 1], acc[ci + 2], acc[ci + 3],
                )  # fmt: skip

    @T.inline
    def product(acc, a, w, a_words, w_words, warp, lane, column):
        for i in T.unroll(4 * tiles):
            acc[i] = T.float32(0)
        for i in T.unroll(8 * unroll):
            a_words[i] = T.uint32(0)
        for i in T.serial(rounds):
            for u in T.unroll(unroll):
                at = T.meta_var(((i * unroll + u) * warps + warp) * UNIT + lane % 4 * CHUNK)
                for t in T.unroll(tiles):
                    row = T.meta_var(column + t * MMA_COLS + lane // 4)
                    last_row = T.meta_var(T.min(row, n - 1) if n_ends else row)
                    load_or_zero(w_words, (u * tiles + t) * 4, at < k if k_ends else True, w, last_row, at)
                load_or_zero(a_words, 8 * u, row_exists(lane // 4, at), a, lane // 4, at)
                if tall:
                    load_or_zero(a_words, 8 * u + 4, row_exists(lane // 4 + 8, at), a, lane // 4 + 8, at)
            for u in T.unroll(unroll):
                multiply(acc, a_words, w_words, u)

    @T.inline
    def write_sums(acc, base, warp, lane):
        for t in T.unroll(tiles):
            for half in T.unroll(1 + tall):
                T.ptx["st.shared.v2.f32"](
                    address(
                        base + ((warp * MMA_ROWS + half * 8 + lane // 4) * pitch + t * 8 + lane % 4 * 2) * FLOAT_BYTES
                    ),
                    acc[4 * t + 2 * half],
                    acc[4 * t + 2 * half + 1],
                )

    @T.inline
    def add_warps(values, base, row, vector):
        """The sum of all warps' vectors, in their order."""
        part = T.alloc_local([4], "float32")
        for i in T.unroll(VECTOR):
            values[i] = T.float32(0)
        for other in T.unroll(warps):
            for half in T.unroll(2):
                T.ptx["ld.shared.v4.f32"](
                    part[0], part[1], part[2], part[3],
                    address(base + ((other * MMA_ROWS + row) * pitch + vector * VECTOR + half * 4) * FLOAT_BYTES),
                )  # fmt: skip
                for i in T.unroll(4):
                    values[half * 4 + i] = values[half * 4 + i] + part[i]

    @T.jit(private=True)
    def kernel(
        a_handle: T.handle,
        w_handle: T.handle,
        handle0: T.Optional(T.handle),
        handle1: T.Optional(T.handle),
        handle2: T.Optional(T.handle),
        handle3: T.Optional(T.handle),
        handle4: T.Optional(T.handle),
        handle5: T.Optional(T.handle),
        out_handle: T.handle,
    ):
        a = T.match_buffer(a_handle, (m, k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        operands = T.meta_var(match_operands((handle0, handle1, handle2, handle3, handle4, handle5), problem.operands))
        out = T.match_buffer(out_handle, (m, n), problem.dtype, align=16)

        T.device_entry()
        cta = T.cta_id([n_ctas(problem, config)])
        thread = T.thread_id([threads])
        base = T.meta_var(shared_memory(shared_bytes(config), align=128))
        acc = T.alloc_local([4 * tiles], "float32")
        a_words = T.alloc_local([8 * unroll], "uint32")
        w_words = T.alloc_local([4 * tiles * unroll], "uint32")
        values = T.alloc_local([VECTOR], "float32")
        row_words = T.alloc_local([max(steps.row_size, 1)], "uint32")
        matrix_words = T.alloc_local([max(steps.matrix_size, 1)], "uint32")
        row = thread // vectors
        column = cta * config.columns + thread % vectors * VECTOR

        if T.And(row < m, column < n):  # start to load before the product
            steps.fetch_rows(row_words, operands, column)
            steps.fetch_matrices(matrix_words, 0, operands, row, column)
        product(acc, a, w, a_words, w_words, thread // 32, thread % 32, cta * config.columns)
        write_sums(acc, base, thread // 32, thread % 32)
        T.cuda.cta_sync()
        if T.And(row < m, column < n):
            add_warps(values, base, row, thread % vectors)
            steps.apply(values, row_words, matrix_words, 0)
            store(lambda i: out.ptr_to([row, column + i]), values)

    absent = [f"handle{i}" for i in range(len(problem.operands), MAX_OPERANDS)]
    return finished(kernel, f"gemv_{config.columns}x{config.warps}x{config.unroll}", absent)
