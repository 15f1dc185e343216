"""Grouped product on CUDA without tensor cores: float32, and half precision whose rows are no multiples of 16 bytes.

A CTA owns a tile of rows of one group, which it finds as the kernel with tensor cores does, and 64 columns.  A thread
adds up 4 × 4 elements of it in float32.  Both operands pass through shared memory, 16 of k at a time, and the next 16
are read from memory meanwhile.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.fusion.grouped.find import row_tile_search
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.template import Operands

NAME = "grouped-simt"
TARGET_KIND = "cuda"
BLOCK_N, BLOCK_K, EACH = 64, 16, 4  # columns and depth of a tile; rows and columns of a thread
ACROSS = BLOCK_N // EACH  # threads side by side
PAD = 4  # floats after a row of shared memory
FLOAT_BYTES = 4
LAUNCH_US, REACHED = 4.0, 0.35  # a launch with its search; the share of a GPU's multiply-adds that it reaches
MULTIPLY_ADDS_PER_US = 128 * 1.7e3  # of a multiprocessor


@dataclass(frozen=True)
class Config:
    """Rows of a tile."""

    block_m: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "64x64x16"."""
        return f"{self.block_m}x{BLOCK_N}x{BLOCK_K}"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block_m // EACH * ACROSS


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GroupedProblem):
        return "it is no grouped product"
    if problem.gate is not None or problem.steps or problem.gathered_from is not None:
        return "it computes the product alone, without a gate and steps, of rows in their order"
    return "an operand has 2^31 elements or more; indices are 32-bit" if problem.is_large else None


def configs(problem: GroupedProblem, target: tvm.target.Target) -> list[Config]:
    """Tiles of many rows and of few, sorted by predicted time."""
    return sorted((Config(64), Config(16)), key=lambda config: predict_us(problem, config, target))


def predict_us(problem: GroupedProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel, for groups of equal size."""
    gpu, used = gpu_of(target), min(problem.groups, problem.m)
    rows = used * -(-problem.m // (used * config.block_m)) * config.block_m
    arithmetic = rows * problem.n * problem.k / (REACHED * MULTIPLY_ADDS_PER_US * gpu.multiprocessors)
    arithmetic *= 1.0 if config.block_m == 64 else 1.5  # small tiles read w more often
    size = FLOAT_BYTES if problem.dtype == "float32" else FLOAT_BYTES // 2
    return LAUNCH_US + max(arithmetic, used * problem.n * problem.k * size / gpu.bandwidth)


def operands(problem: GroupedProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Nothing."""
    return Operands()


def shared_bytes(config: Config) -> int:
    """Bytes of shared memory: a's tile, then w's, each with k along its rows."""
    return BLOCK_K * (config.block_m + BLOCK_N + 2 * PAD) * FLOAT_BYTES


def grid_size(problem: GroupedProblem, config: Config) -> int:
    """CTAs of the grid."""
    return problem.row_tiles(config.block_m) * -(-problem.n // BLOCK_N)


def instantiate(problem: GroupedProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, offsets, out."""
    m, n, k, groups, dtype = problem.m, problem.n, problem.k, problem.groups, problem.dtype
    block_m, threads, n_tiles = config.block_m, config.threads, -(-n // BLOCK_N)
    is_nk = problem.w_layout == "nk"
    a_passes, w_passes = block_m * BLOCK_K // threads, BLOCK_N * BLOCK_K // threads
    a_pitch, w_pitch = (block_m + PAD) * FLOAT_BYTES, (BLOCK_N + PAD) * FLOAT_BYTES
    w_offset, blocks = BLOCK_K * a_pitch, -(-k // BLOCK_K)
    find = row_tile_search(problem, block_m)

    def place(thread, i, width):
        """(position along k, position along the other dimension) of pass i: neighbours along k, or along `width`."""
        element = thread + i * threads
        return (element % BLOCK_K, element // BLOCK_K) if width is None else (element // width, element % width)

    def element_of(buffer, exists, indices):
        return T.if_then_else(exists, T.cast(buffer[indices], "float32"), T.float32(0))

    w_width = None if is_nk else BLOCK_N

    @T.inline
    def read(ahead, thread, a, w, group, row, end, column, block):
        for i in T.unroll(a_passes):
            at_k, at_m = T.meta_var(place(thread, i, None))
            depth = T.meta_var(block * BLOCK_K + at_k)
            ahead[i] = element_of(a, T.And(row + at_m < end, depth < k), (row + at_m, depth))
        for i in T.unroll(w_passes):
            at_k, at_n = T.meta_var(place(thread, i, w_width))
            depth = T.meta_var(block * BLOCK_K + at_k)
            where = T.meta_var((group, column + at_n, depth) if is_nk else (group, depth, column + at_n))
            ahead[a_passes + i] = element_of(w, T.And(column + at_n < n, depth < k), where)

    @T.inline
    def keep(ahead, thread, base):
        for i in T.unroll(a_passes):
            at_k, at_m = T.meta_var(place(thread, i, None))
            T.ptx["st.shared.f32"](address(base + at_k * a_pitch + at_m * FLOAT_BYTES), ahead[i])
        for i in T.unroll(w_passes):
            at_k, at_n = T.meta_var(place(thread, i, w_width))
            T.ptx["st.shared.f32"](address(base + w_offset + at_k * w_pitch + at_n * FLOAT_BYTES), ahead[a_passes + i])

    @T.inline
    def load(values, at):
        T.ptx["ld.shared.v4.f32"](values[0], values[1], values[2], values[3], address(at))

    @T.jit(private=True)
    def kernel(a_handle: T.handle, w_handle: T.handle, offsets_handle: T.handle, out_handle: T.handle):
        a = T.match_buffer(a_handle, (m, k), dtype)
        w = T.match_buffer(w_handle, problem.w_shape, dtype)
        offsets = T.match_buffer(offsets_handle, (groups,), problem.offsets_dtype)
        out = T.match_buffer(out_handle, (m, n), dtype)

        T.device_entry()
        cta = T.cta_id([grid_size(problem, config)])
        thread = T.thread_id([threads])
        base = T.meta_var(shared_memory(shared_bytes(config), align=128))
        found = T.alloc_local([3], "int32")
        acc = T.alloc_local([EACH * EACH], "float32")
        part = T.alloc_local([EACH * EACH], "float32")
        ahead = T.alloc_local([a_passes + w_passes], "float32")
        of_a = T.alloc_local([EACH], "float32")
        of_w = T.alloc_local([EACH], "float32")
        find(found, offsets, cta // n_tiles, thread % 32)
        column = cta % n_tiles * BLOCK_N
        if found[0] >= 0:
            group = found[0]
            row = found[1]
            end = found[2]
            for i in T.unroll(EACH * EACH):
                acc[i] = T.float32(0)
            if group < groups:
                read(ahead, thread, a, w, group, row, end, column, 0)
                for block in T.serial(blocks):
                    T.cuda.cta_sync()
                    keep(ahead, thread, base)
                    T.cuda.cta_sync()
                    if block + 1 < blocks:
                        read(ahead, thread, a, w, group, row, end, column, block + 1)
                    # The sums of a block first: a long chain of additions would lose digits.
                    for i in T.unroll(EACH * EACH):
                        part[i] = T.float32(0)
                    for i in T.unroll(BLOCK_K):
                        load(of_a, base + i * a_pitch + thread // ACROSS * (EACH * FLOAT_BYTES))
                        load(of_w, base + w_offset + i * w_pitch + thread % ACROSS * (EACH * FLOAT_BYTES))
                        for r in T.unroll(EACH):
                            for c in T.unroll(EACH):
                                part[r * EACH + c] = part[r * EACH + c] + of_a[r] * of_w[c]
                    for i in T.unroll(EACH * EACH):
                        acc[i] = acc[i] + part[i]
            for r in T.unroll(EACH):
                for c in T.unroll(EACH):
                    at_row = T.meta_var(row + thread // ACROSS * EACH + r)
                    at_column = T.meta_var(column + thread % ACROSS * EACH + c)
                    if T.And(at_row < end, at_column < n):
                        out[at_row, at_column] = T.cast(acc[r * EACH + c], dtype)

    return finished(kernel, f"grouped_simt_{block_m}", ())
