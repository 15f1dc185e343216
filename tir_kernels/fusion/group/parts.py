"""The work of a domain: its CTAs, and the code of one of their threads, for vectors anywhere and for rows of a norm."""

import math

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.group.boxes.box import box_of
from tir_kernels.fusion.group.boxes.part import BoxPart
from tir_kernels.fusion.group.domains import Domain, norm_indices
from tir_kernels.fusion.group.emit import Emitter, assign
from tir_kernels.fusion.group.indices import unflatten
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.store import decode, store_lanes
from tir_kernels.fusion.group.symbols import Symbols, substitute
from tir_kernels.fusion.problem import Norm
from tir_kernels.fusion.rows.geometry import RowConfig, RowGeometry
from tir_kernels.fusion.rows.statistics import local_buffers, row_statistics
from tir_kernels.fusion.steps import VECTOR

THREADS_PER_ROW = (1, 2, 4, 8, 16, *range(WARP, 1024 + 1, WARP))


def part_of(problem: GroupProblem, domain: Domain, threads: int, vectors_per_thread: int):
    """The part of a domain: `ctas` of `threads` with `shared_bytes` each, and `emit`, which writes a thread's code.

    A thread holds at most `vectors_per_thread` vectors of a norm's row.  `emit` gets the CTA's shared memory as a
    buffer of bytes, and its address where a norm needs it.
    """
    if domain.norm is not None:
        return RowPart(problem, domain, domain.norm, threads, vectors_per_thread)
    box = box_of(problem, domain)
    return VectorPart(problem, domain, threads) if box is None else BoxPart(problem, domain, box, threads)


class VectorPart:
    """A thread computes one vector of the results, wherever it is."""

    shared_bytes = 0

    def __init__(self, problem: GroupProblem, domain: Domain, threads: int):
        self.problem, self.domain, self.threads = problem, domain, threads
        self.elements = math.prod(domain.shape)
        self.vectors = -(-self.elements // VECTOR)
        self.ctas = -(-self.vectors // threads)

    def emit(self, sources, outputs, cta, thread, pool, slot) -> None:
        """The code of a thread of the part's CTA number `cta`."""
        symbols, last, domain = Symbols(), self.vectors - 1, self.domain
        ends = self.ctas * self.threads != self.vectors
        number = scalar("vector", cta * self.threads + thread)
        inside = [number <= last] if ends else []
        at = scalar("read", T.min(number, last)) if ends else number
        if domain.shape and domain.shape[-1] % VECTOR == 0:
            row_vectors = domain.n // VECTOR
            column = symbols.new("column", row_vectors)
            rows, indices = domain.places(symbols, column)
            symbols.registers[column] = scalar("column", T.truncmod(at, row_vectors))
            decode(symbols, rows, scalar("row", T.truncdiv(at, row_vectors)))
        else:
            var = symbols.new("vector", self.vectors)
            symbols.registers[var] = at
            position = var * VECTOR + symbols.lane
            if self.elements % VECTOR:
                position = tirx.Min(position, tirx.IntImm("int32", self.elements - 1))
            indices = unflatten(position, domain.shape)
        emitter = Emitter(self.problem, sources, symbols)
        results = [(result, emitter.lanes(result, indices)) for result in domain.results]
        for result, lanes in results:
            limit = number if self.elements % VECTOR else None
            store_lanes(self.problem, result, lanes, indices, outputs, symbols, inside, limit)


class RowPart:
    """The threads of a row compute its norm, and results from it."""

    def __init__(self, problem: GroupProblem, domain: Domain, norm: int, threads: int, vectors_per_thread: int):
        self.problem, self.domain, self.norm = problem, domain, norm
        wanted = -(-domain.n // VECTOR // vectors_per_thread)
        each = next(count for count in THREADS_PER_ROW if count >= wanted)
        self.geometry = RowGeometry(domain.m, domain.n, RowConfig(each, threads // each))
        self.ctas = self.geometry.ctas
        # Threads that are left over work like those of one more row, and write nothing.
        self.idle = threads % each != 0
        shares = self.geometry.warps_per_row > 1
        self.shared_bytes = self.geometry.shared_bytes + self.geometry.row_bytes if shares else 0

    def emit(self, sources, outputs, cta, thread, pool, slot) -> None:
        """The code of a thread of the part's CTA number `cta`: its row's statistics, then vectors of the results."""
        g, norm, domain, symbols = self.geometry, self.norm, self.domain, Symbols()
        value = self.problem.computed(norm)
        lane = thread % g.config.threads_per_row
        group = thread // g.config.threads_per_row
        row = scalar("row", cta * g.config.rows_per_cta + group)
        read = scalar("read", T.min(row, g.m - 1)) if g.rows_end or self.idle else row
        first = symbols.new("column", g.vectors)
        rows, indices = domain.places(symbols, first)
        decode(symbols, rows, read)
        columns = [symbols.new(f"column{v}", g.vectors) for v in range(g.vectors_per_thread)]
        for v, column in enumerate(columns):
            symbols.registers[column] = scalar("column", T.truncdiv(g.column(v, lane), VECTOR))
        emitter = Emitter(self.problem, sources, symbols)
        # Where a row of the result is padding, the statistics are those of the nearest row, and not used.
        found = norm_indices(self.problem, domain, symbols, indices)
        outer = [symbols.inside(index, n) for index, n in zip(found, value.shape)]
        values = []
        for column in columns:
            lanes = emitter.lanes(value.arguments[0], [*outer, column * VECTOR + symbols.lane])
            (buffer,) = local_buffers("values", 1, VECTOR, "float32")
            for i in range(VECTOR):
                assign(buffer, i, lanes[i % len(lanes)])
            values.append(buffer)
        pair = IRBuilder.name("pair", T.alloc_local([2], "float32"))
        kind = Norm(value.operator, float(value.numbers[0]), False, False)
        place = slot + group * g.row_bytes if self.shared_bytes else None
        row_statistics(g, kind)(pair, values, lane, place)
        emitter.pairs[norm] = pair
        for v, column in enumerate(columns):
            at = [substitute(index, {first: column}) for index in indices]
            inside = [row < g.m] * g.rows_end + [group < g.config.rows_per_cta] * self.idle
            inside += [lane + v * g.config.threads_per_row < g.vectors] * (not g.always_inside(v))
            for result in domain.results:
                store_lanes(self.problem, result, emitter.lanes(result, at), at, outputs, symbols, inside)
