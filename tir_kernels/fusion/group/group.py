"""An elementwise group on CUDA (sm_80 and up) in one kernel: any graph of elementwise operators, casts and views.

The kernel is bound by memory: every thread computes vectors of 8 neighbours of a result, and reads each source where
its views lead, 16 bytes at a time where they leave neighbours together, in this order or another (runs.py).  Norms of
rows (one for a result) are computed as the row kernels do, by threads that hold a row together.  Where a source does
not lie as the results do, as in a transposition, it passes through shared memory, box by box (boxes/): both sides of
the memory are walked along their own neighbours.  Results of different shapes, such as queries and keys, are computed
by different CTAs of the same kernel.
"""

import math
from dataclasses import dataclass
from functools import cache

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import WARP, gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import address_of, shared_buffer
from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.domains import domains_of
from tir_kernels.fusion.group.emit import branch
from tir_kernels.fusion.group.limits import bytes_moved, refusal_of_values
from tir_kernels.fusion.group.parts import THREADS_PER_ROW, part_of
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.sums import refusal_of_sums, repeats
from tir_kernels.fusion.rows.cost import predict_bytes_us
from tir_kernels.fusion.steps import VECTOR
from tir_kernels.template import Operands

NAME = "group"
TARGET_KIND = "cuda"
MAX_SOURCES, MAX_RESULTS = 16, 16
MAX_VECTORS = 4  # of a row, for each thread
REPEATED_CYCLES = 4  # that an operator of a vector takes
CYCLES_PER_US = 1700.0


@dataclass(frozen=True)
class GroupConfig:
    """Threads of a CTA, and the most vectors of a norm's row that a thread holds."""

    threads: int
    vectors_per_thread: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "256 threads 1 vectors"."""
        return f"{self.threads} threads {self.vectors_per_thread} vectors"


Config = GroupConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    return _refusal(problem) if isinstance(problem, GroupProblem) else "it is no elementwise group"


@cache
def _refusal(problem: GroupProblem) -> str | None:
    if why := refusal_of_values(problem, MAX_SOURCES, MAX_RESULTS) or refusal_of_sums(problem):
        return why
    try:
        domains = domains_of(problem)
    except UnsupportedError as error:
        return str(error)
    for domain in domains:
        if domain.norm is not None and domain.n > VECTOR * MAX_VECTORS * THREADS_PER_ROW[-1]:
            return f"rows of {domain.n} are too long for a CTA's registers"
    return None


def configs(problem: GroupProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration; the default first."""
    rows = [domain.n // VECTOR for domain in domains_of(problem) if domain.norm is not None]
    found = [
        Config(threads, vectors)
        for threads, vectors in ((256, 1), (128, 1), (256, 2), (256, 4), (512, 4), (1024, 4))
        if all(-(-n // vectors) <= threads for n in rows) and (rows or vectors == 1)
        # So many threads have few registers: they are for rows that fewer cannot hold.
        if threads < THREADS_PER_ROW[-1] or max(rows, default=0) > vectors * threads // 2
    ]
    # Rows of many vectors are spread over few CTAs; four vectors a thread keep their loads under way together.
    wide = max(rows, default=0) > 256
    return sorted(found, key=lambda config: (wide and config.vectors_per_thread < 4, config.threads)) if wide else found


def predict_us(problem: GroupProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel: what it moves, and the operators that each thread repeats for its sums."""
    gpu, repeated = gpu_of(target), sum(count - 1 for count in repeats(problem).values())
    warps = sum(math.prod(shape) for shape, _ in problem.outputs) / VECTOR / WARP
    issued = warps * repeated * REPEATED_CYCLES / (gpu.multiprocessors * gpu.partitions)
    return predict_bytes_us(bytes_moved(problem), target) + issued / CYCLES_PER_US


def operands(problem: GroupProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: GroupProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments are the sources, then the results."""
    domains = domains_of(problem)
    parts = [part_of(problem, domain, config.threads, config.vectors_per_thread) for domain in domains]
    pairs = list(zip(parts, domains))
    ctas = sum(part.ctas for part in parts)
    shared = max((part.shared_bytes for part in parts), default=0)

    def flat(buffers):
        """The same memory by the elements' positions."""
        return [T.decl_buffer((math.prod(x.shape),), x.dtype, data=x.data) for x in buffers]

    def work(sources, outputs, cta, thread):
        pool = shared_buffer(shared, align=16) if shared else None
        slot = (
            address_of(pool) if any(part.shared_bytes and domain.norm is not None for part, domain in pairs) else None
        )
        read, written = flat(sources), flat(outputs)
        _choose(parts, 0, cta, lambda part, own: part.emit(read, written, own, thread, pool, slot))

    @T.jit(private=True)
    def kernel(
        x0: T.Optional(T.handle),
        x1: T.Optional(T.handle),
        x2: T.Optional(T.handle),
        x3: T.Optional(T.handle),
        x4: T.Optional(T.handle),
        x5: T.Optional(T.handle),
        x6: T.Optional(T.handle),
        x7: T.Optional(T.handle),
        x8: T.Optional(T.handle),
        x9: T.Optional(T.handle),
        x10: T.Optional(T.handle),
        x11: T.Optional(T.handle),
        x12: T.Optional(T.handle),
        x13: T.Optional(T.handle),
        x14: T.Optional(T.handle),
        x15: T.Optional(T.handle),
        out0: T.Optional(T.handle),
        out1: T.Optional(T.handle),
        out2: T.Optional(T.handle),
        out3: T.Optional(T.handle),
        out4: T.Optional(T.handle),
        out5: T.Optional(T.handle),
        out6: T.Optional(T.handle),
        out7: T.Optional(T.handle),
        out8: T.Optional(T.handle),
        out9: T.Optional(T.handle),
        out10: T.Optional(T.handle),
        out11: T.Optional(T.handle),
        out12: T.Optional(T.handle),
        out13: T.Optional(T.handle),
        out14: T.Optional(T.handle),
        out15: T.Optional(T.handle),
    ):
        handles = T.meta_var((x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15))
        sources = T.meta_var(match_tensors(handles, problem.inputs, "source"))
        places = T.meta_var(
            (out0, out1, out2, out3, out4, out5, out6, out7, out8, out9, out10, out11, out12, out13, out14, out15)
        )
        outputs = T.meta_var(match_tensors(places, problem.outputs, "result"))

        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([config.threads])
        work(sources, outputs, cta, thread)

    absent = [f"x{i}" for i in range(len(problem.sources), MAX_SOURCES)]
    absent += [f"out{i}" for i in range(len(problem.results), MAX_RESULTS)]
    return finished(kernel, f"group_{config.threads}x{config.vectors_per_thread}", absent)


def match_tensors(handles, specs, name: str) -> list:
    """The buffers of the handles that a kernel got for tensors, as "source0", "source1", …"""
    pairs = enumerate(zip(handles, specs))
    return [IRBuilder.name(f"{name}{i}", T.match_buffer(h, *spec, align=16)) for i, (h, spec) in pairs]


def _choose(parts, first_cta, cta, emit) -> None:
    """Emit each part for its CTAs."""
    part, *rest = parts
    own = cta - first_cta if first_cta else cta
    if not rest:
        emit(part, own)
        return
    end = first_cta + part.ctas
    branch(cta < end, lambda: emit(part, own), lambda: _choose(rest, end, cta, emit))
