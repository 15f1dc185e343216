"""An elementwise chain and LayerNorm or RMSNorm of each row on CUDA (sm_80 and up), in one pass over memory.

The kernel is bound by memory: a row is read once, 16 bytes a thread, and stays in registers until it is stored.  Part
of a warp, a warp or several warps work on a row; all loads are under way before the first value is used.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional
from tir_kernels.fusion.problem import GemmProblem, RowProblem
from tir_kernels.fusion.rows.cost import predict_row_us
from tir_kernels.fusion.rows.device import decode_vector, row_of_thread, row_work, vector_loads
from tir_kernels.fusion.rows.geometry import RowConfig, RowGeometry, refusal, row_configs, steps_refusal
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import match_operands, vector_words
from tir_kernels.template import Operands

NAME = "row-norm"
TARGET_KIND = "cuda"
Config = RowConfig
MAX_OPERANDS = 6


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, RowProblem) or isinstance(problem, GemmProblem):
        return "it is no elementwise chain and norm of a matrix"
    if problem.norm is None:
        return "it has no norm: the row-chain kernel needs no whole rows"
    return steps_refusal(problem, MAX_OPERANDS) or refusal(problem.m, problem.n)


def configs(problem: RowProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers; the default first."""
    matrices = 1 + sum(step.operand == "matrix" for step in problem.steps)
    return row_configs(problem.m, problem.n, gpu_of(target), matrices=matrices)


def predict_us(problem: RowProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    return predict_row_us(problem, target)


def operands(problem: RowProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: RowProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments x, the steps' operands, the norm's weight and bias, out, and out_sum where it is kept."""
    g = RowGeometry(problem.m, problem.n, config)
    work = row_work(g, problem)
    load_row, _ = vector_loads(g, problem.dtype)
    decode = decode_vector(problem.dtype)
    shape, dtype = (problem.m, problem.n), problem.dtype

    def take(r, words):
        for values, some in zip(r.values, words):
            decode(values, some)

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
        sum_handle: T.Optional(T.handle),
    ):
        x = T.match_buffer(x_handle, shape, dtype, align=16)
        operands = T.meta_var(match_operands((handle0, handle1, handle2, handle3, handle4, handle5), problem.operands))
        out = T.match_buffer(out_handle, shape, dtype, align=16)
        out_sum = T.meta_var(match_optional("out_sum", sum_handle, shape, dtype, align=16))

        T.device_entry()
        row, row_read, row_lane, slot = T.meta_var(row_of_thread(g))
        r = T.meta_var(work.registers())
        words = T.meta_var(local_buffers("words", g.vectors_per_thread, vector_words(dtype), "uint32"))

        load_row(words, x, row_read, row_lane)
        work.fetch(r, operands, row_read, row_lane)
        take(r, words)
        work.apply(r)
        work.finish(r, row, row_lane, slot, out, out_sum)

    absent = [f"handle{i}" for i in range(len(problem.operands), MAX_OPERANDS)]
    absent += ["sum_handle"] * (not problem.keeps_sum)
    return finished(kernel, f"row_norm_{config.threads_per_row}x{config.rows_per_cta}", absent)
