"""Runs of rows sorted on CUDA (sm_80 and up), a thread for each element: no atomics, and each run is always the same.

Up to 32 neighbours find their places by comparing all with all.  Then up to 4 sorted runs at a time are merged in
shared memory: the place of an element is its place in its own run, and for each other run the number of elements that
come before it, which is found by halving.  A CTA sorts several short runs or one of up to 1024 elements.
"""

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, scalar
from tir_kernels.fusion.rows.geometry import MAX_INT32
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.sorting.cost import predict_sorting_us
from tir_kernels.fusion.sorting.device import LARGEST, Run, add_places, assign, comes_before, key, sync
from tir_kernels.fusion.sorting.problem import KEYS, SortProblem
from tir_kernels.template import Operands

NAME = "sort"
TARGET_KIND = "cuda"
FAN = 4  # runs that are merged at a time in shared memory: of 8, a thread's registers would not hold all searches


@dataclass(frozen=True)
class SortConfig:
    """The threads of a CTA that sorts several runs; one run has as many threads as elements, in whole warps."""

    threads: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "256 threads"."""
        return f"{self.threads} threads"


Config = SortConfig


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, SortProblem):
        return "it sorts no rows"
    if problem.rows * problem.n > MAX_INT32:
        return f"{problem.rows} rows of {problem.n} are 2^31 elements or more; indices are 32-bit"
    return None


def configs(problem: SortProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration; the default first.  One run fills a CTA where it is long, whatever the configuration."""
    return [Config(threads) for threads in (256, 128) if threads == 256 or Layout(problem, Config(threads)).slots > 1]


def operands(problem: SortProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


class Layout:
    """How threads and places of shared memory are divided: `width` of each run, `slots` runs of a CTA."""

    def __init__(self, problem: SortProblem, config: SortConfig):
        longest = problem.out_run
        self.first = min(WARP, 1 << (longest - 1).bit_length())  # neighbours that are all compared
        self.width = -(-longest // self.first) * self.first
        self.slots = max(1, config.threads // self.width)
        self.threads = self.width * self.slots
        self.ctas = -(-problem.rows * problem.out_runs // self.slots)

    @property
    def merges(self) -> list[tuple[int, int]]:
        """(length of the runs, how many of them are merged) of each step."""
        found, length = [], self.first
        while length < self.width:
            fan = min(FAN, -(-self.width // length))
            found.append((length, fan))
            length *= fan
        return found

    @property
    def steps(self) -> int:
        """Comparisons of a thread."""
        return self.first + sum((fan - 1) * length.bit_length() for length, fan in self.merges)


def predict_us(problem: SortProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel."""
    layout = Layout(problem, config)
    return predict_sorting_us(problem, layout.ctas * layout.threads, layout.threads, layout.steps, target)


def instantiate(problem: SortProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments x, values, order, and ranks where they are wanted."""
    p, layout, kind = problem, Layout(problem, config), KEYS[problem.dtype]
    last = tirx.const(LARGEST[kind], kind)

    @T.inline
    def store(where, values, order, at, value, position):
        if where:
            values[at] = value
            order[at] = position

    @T.inline
    def store_rank(where, ranks, at, rank):
        if where:
            ranks[at] = rank

    def keep_in_order(keys, places, at, mine, place):
        sync()
        assign(keys, at, mine)
        assign(places, at, place)
        sync()

    def work(x, values, order, ranks, keys, places, cta, thread):
        slot, own = thread // layout.width, thread % layout.width
        number = scalar("number", cta * layout.slots + slot)
        whole = p.rows * p.out_runs
        some = scalar("some", T.min(number, whole - 1)) if whole % layout.slots else number
        row, run = (some // p.out_runs, some % p.out_runs) if p.out_runs > 1 else (some, T.int32(0))
        row, first = scalar("row", row), scalar("first", run * p.out_run)
        length = scalar("length", T.min(p.n - first, p.out_run))
        # Threads past the end of the run have the largest key, and come after all with the same.
        read = key(x[row, first + T.min(own, length - 1)], p.dtype, p.descending)
        mine = scalar("mine", T.Select(own < length, read, last))
        place = scalar("place", own)
        rank = local_buffers("rank", 1, 1, "int32")[0]
        assign(keys, thread, mine)
        sync()
        assign(rank, 0, T.int32(0))
        start = scalar("start", thread // layout.first * layout.first)
        for i in range(layout.first):
            is_before = comes_before(keys[start + i], mine, start + i < thread)
            assign(rank, 0, rank[0] + T.Select(is_before, 1, 0))
        group = T.int32(0)
        base = scalar("base", slot * layout.width)
        for i, (size, fan) in enumerate(layout.merges):
            if i == 0:
                at = start + rank[0]
            else:
                at = base + group + rank[0]
            keep_in_order(keys, places, scalar("at", at), mine, place)
            mine, place = scalar("mine", keys[thread]), scalar("place", places[thread])
            assign(rank, 0, own % size)
            group = scalar("group", own // (size * fan) * (size * fan))
            others = []
            for distance in range(1, fan):
                other = scalar("run", group // size + (own // size + distance) % fan)
                exists = T.max(T.min(layout.width - other * size, size), 0)
                others.append(Run(base + T.min(other * size, layout.width - 1), exists, other < own // size))
            add_places(rank, lambda at: keys[at], mine, others, size)
        at = scalar("at", rank[0])
        inside = T.And(place < length, number < whole) if whole % layout.slots else place < length
        stored = row, run * p.keep + at
        position = T.cast(first + place, p.order_dtype)
        read_again = x[row, first + T.min(place, length - 1)]
        store(T.And(inside, at < p.keep), values, order, stored, read_again, position)
        if p.ranks:
            store_rank(inside, ranks, (row, place), T.cast(at, p.order_dtype))

    @T.jit(private=True)
    def kernel(x_handle: T.handle, values_handle: T.handle, order_handle: T.handle, ranks_handle: T.Optional(T.handle)):
        x = T.match_buffer(x_handle, (p.rows, p.n), p.dtype)
        values = T.match_buffer(values_handle, (p.rows, p.kept), p.dtype)
        order = T.match_buffer(order_handle, (p.rows, p.kept), p.order_dtype)
        ranks = T.meta_var(match_optional("ranks", ranks_handle, (p.rows, p.n), p.order_dtype))

        T.device_entry()
        cta = T.cta_id([layout.ctas])
        thread = T.thread_id([layout.threads])
        keys = T.alloc_buffer((layout.threads,), kind, scope="shared")
        places = T.alloc_buffer((layout.threads,), "int32", scope="shared")
        work(x, values, order, ranks, keys, places, cta, thread)

    absent = [] if p.ranks else ["ranks_handle"]
    return finished(kernel, f"sort_{layout.width}x{layout.slots}", absent)
