"""Sorted runs merged on CUDA (sm_80 and up): each element finds its place in up to 32 runs, and writes itself there.

The place is the element's place in its own run, and for each other run the number of elements that come before it,
which is found by halving.  Lanes of a warp have neighbours of a run, so they read the same elements or neighbours.
Each warp of a CTA searches some of the runs for the same 32 elements.
"""

from dataclasses import dataclass

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, scalar
from tir_kernels.fusion.rows.geometry import MAX_INT32
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.sorting.cost import predict_sorting_us
from tir_kernels.fusion.sorting.device import Run, add_places, assign, key, sync
from tir_kernels.fusion.sorting.problem import MAX_FAN, MergeProblem
from tir_kernels.template import Operands

NAME = "sort-merge"
TARGET_KIND = "cuda"


@dataclass(frozen=True)
class MergeConfig:
    """The warps of a CTA, which share the runs."""

    warps: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "8 warps"."""
        return f"{self.warps} warps"


Config = MergeConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, MergeProblem):
        return "it merges no sorted runs"
    if problem.rows * problem.n > MAX_INT32:
        return f"{problem.rows} rows of {problem.n} are 2^31 elements or more; indices are 32-bit"
    return None


def configs(problem: MergeProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration; the default first."""
    fan = min(MAX_FAN, problem.runs)
    return [Config(warps) for warps in (8, 4, 2, 1) if warps <= max(1, fan // 2)]


def operands(problem: MergeProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def grid_size(problem: MergeProblem) -> int:
    """CTAs of the grid: one for each 32 elements of a run."""
    return problem.rows * problem.runs * -(-min(problem.run, problem.n) // WARP)


def searches(problem: MergeProblem, config: Config) -> int:
    """Runs that a warp searches."""
    return -(-min(MAX_FAN, problem.runs) // config.warps)


def predict_us(problem: MergeProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    threads = config.warps * WARP
    steps = searches(problem, config) * problem.run.bit_length()
    return predict_sorting_us(problem, grid_size(problem) * threads, threads, steps, target)


def instantiate(problem: MergeProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments values, order, out_values, out_order, and ranks where they are wanted."""
    p, run, fan = problem, min(problem.run, problem.n), min(MAX_FAN, problem.runs)
    pieces, each = -(-run // WARP), searches(problem, config)
    threads = config.warps * WARP

    @T.inline
    def store(where, out_values, out_order, at, values, order, source):
        if where:
            out_values[at] = values[source]
            out_order[at] = T.cast(order[source], p.order_dtype)

    @T.inline
    def store_rank(where, ranks, row, order, source, rank):
        if where:
            ranks[row, T.max(T.min(order[source], p.n - 1), 0)] = rank

    def work(values, order, out_values, out_order, ranks, found, cta, thread):
        warp, lane = thread // WARP, thread % WARP
        row = scalar("row", cta // (p.runs * pieces))
        own = scalar("own", cta // pieces % p.runs)
        at = scalar("at", cta % pieces * WARP + lane)
        length = scalar("length", T.min(p.n - own * run, run))
        source = scalar("source", own * run + T.min(at, length - 1))
        mine = scalar("mine", key(values[row, source], p.dtype, p.descending))
        first = scalar("first", own // fan * fan)
        runs = []
        for i in range(each):
            other = scalar("run", first + warp + i * config.warps)
            exists = T.max(T.min(p.n - other * run, run), 0)
            # Runs of other groups, and past the last one, have no elements; nor has its own.
            is_other = T.And(other != own, other < first + fan)
            exists = scalar("exists", T.Select(is_other, exists, 0))
            runs.append(Run(T.min(other * run, p.n - 1), exists, other < own))
        (rank,) = local_buffers("rank", 1, 1, "int32")
        assign(rank, 0, T.int32(0))
        add_places(rank, lambda place: key(values[row, place], p.dtype, p.descending), mine, runs, run)
        if config.warps > 1:
            assign(found, thread, rank[0])
            sync()
            assign(rank, 0, T.int32(0))
            for i in range(config.warps):
                assign(rank, 0, rank[0] + found[i * WARP + lane])
        place = scalar("place", rank[0] + at)
        # A warp writes the values, and the order with them; every thread knows the place.
        inside = T.And(at < length, warp == 0) if config.warps > 1 else at < length
        stored = row, own // fan * p.keep + place
        store(T.And(inside, place < p.keep), out_values, out_order, stored, values, order, (row, source))
        if p.ranks:
            store_rank(inside, ranks, row, order, (row, source), T.cast(place, p.order_dtype))

    @T.jit(private=True)
    def kernel(
        values_handle: T.handle,
        order_handle: T.handle,
        out_values_handle: T.handle,
        out_order_handle: T.handle,
        ranks_handle: T.Optional(T.handle),
    ):
        values = T.match_buffer(values_handle, (p.rows, p.n), p.dtype)
        order = T.match_buffer(order_handle, (p.rows, p.n), "int32")
        out_values = T.match_buffer(out_values_handle, (p.rows, p.kept), p.dtype)
        out_order = T.match_buffer(out_order_handle, (p.rows, p.kept), p.order_dtype)
        ranks = T.meta_var(match_optional("ranks", ranks_handle, (p.rows, p.n), p.order_dtype))

        T.device_entry()
        cta = T.cta_id([grid_size(p)])
        thread = T.thread_id([threads])
        found = T.alloc_buffer((threads,), "int32", scope="shared")
        work(values, order, out_values, out_order, ranks, found, cta, thread)

    absent = [] if p.ranks else ["ranks_handle"]
    return finished(kernel, f"sort_merge_{config.warps}", absent)
