"""An elementwise group on CUDA (sm_80 and up) in one kernel: any graph of elementwise operators, casts and views.

The kernel is bound by memory: every thread computes vectors of 8 neighbours of a result, and reads each source where
its views lead, 16 bytes at a time where they leave neighbours together.  Norms of rows (one for a result) are computed
as the row kernels do, by threads that hold a row together.  A transposition is one of registers: a thread reads 8
vectors along one axis and writes 8 along the other.  Results of different shapes, such as queries and keys, are
computed by different CTAs of the same kernel.
"""

import math
from dataclasses import dataclass
from functools import cache

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import scalar, shared_memory
from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.domains import Domain, domains_of, fast_axis, norm_indices
from tir_kernels.fusion.group.emit import Emitter, all_of, assign, branch, register_dtype
from tir_kernels.fusion.group.indices import flatten, unflatten
from tir_kernels.fusion.group.operators import APPROXIMATE, ELEMENTWISE, OF_BOOLEANS, OF_FLOATS
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.symbols import Symbols, substitute
from tir_kernels.fusion.problem import DTYPES, Norm
from tir_kernels.fusion.rows.cost import predict_bytes_us
from tir_kernels.fusion.rows.geometry import MAX_INT32, RowConfig, RowGeometry
from tir_kernels.fusion.rows.statistics import local_buffers, row_statistics
from tir_kernels.fusion.steps import VECTOR, store_vector
from tir_kernels.template import Operands

NAME = "group"
TARGET_KIND = "cuda"
MAX_SOURCES, MAX_RESULTS, MAX_VALUES = 16, 4, 96
MAX_CONDITIONS = 64
MAX_TILE_VALUES = 24  # of a group whose threads compute VECTOR vectors each: that is as often as its code is repeated
TILE_THREADS = 4, 8  # neighbouring threads of a transposition, along the axis that it reads and the one that it writes
MAX_VECTORS = 4  # of a row, for each thread
THREADS_PER_ROW = (1, 2, 4, 8, 16, *range(WARP, 1024 + 1, WARP))
SOURCE_DTYPES = (*DTYPES, "int64", "int32", "bool")


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
    counts = (len(problem.sources), MAX_SOURCES, "sources"), (len(problem.results), MAX_RESULTS, "results")
    for count, most, what in (*counts, (len(problem.values), MAX_VALUES, "operators")):
        if count > most:
            return f"{count} {what}, more than {most}"
    everything = [problem.value(number) for number in range(len(problem.sources) + len(problem.values))]
    for value in everything:
        if value.dtype not in SOURCE_DTYPES:
            return f"it holds {value.dtype}, which is none of {', '.join(SOURCE_DTYPES)}"
        if math.prod(value.shape) > MAX_INT32:
            return f"{value.shape} is 2^31 elements or more; indices are 32-bit"
        if not math.prod(value.shape):
            return f"{value.shape} has no elements"
    exact = any(dtype == "float32" for _, dtype in problem.outputs)
    for value in problem.values:
        dtypes = {problem.value(argument).dtype for argument in value.arguments}
        if exact and value.operator in APPROXIMATE:
            return f"{value.operator} in a result of float32: it is right to half precision's accuracy"
        if value.operator in OF_FLOATS and not dtypes <= set(DTYPES):
            return f"{value.operator} of {' and '.join(sorted(dtypes))}"
        if value.operator in ELEMENTWISE and value.operator not in OF_BOOLEANS | {"where"} and "bool" in dtypes:
            return f"{value.operator} of bool"
    if (size := max(_conditions(problem).values(), default=0)) > MAX_CONDITIONS:
        return f"{size} operators in one condition, which is computed where it is used; at most {MAX_CONDITIONS} are"
    try:
        domains = domains_of(problem)
    except UnsupportedError as error:
        return str(error)
    for domain in domains:
        if domain.norm is not None and domain.n > VECTOR * MAX_VECTORS * THREADS_PER_ROW[-1]:
            return f"rows of {domain.n} are too long for a CTA's registers"
    return None


def _conditions(problem: GroupProblem) -> dict[int, int]:
    """For each boolean value, and casts of it, the operators of its expression: they lie in no registers."""
    sizes: dict[int, int] = {}
    for number, value in enumerate(problem.values, len(problem.sources)):
        if value.dtype == "bool" or value.operator == "cast" and value.arguments[0] in sizes:
            sizes[number] = 1 + sum(sizes.get(argument, 0) for argument in value.arguments)
    return sizes


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
    """Predicted microseconds of the kernel: it reads what its views lead to and writes its results, once."""
    read = sum(
        count * tvm.DataType(source.dtype).itemsize for count, source in zip(problem.elements_read, problem.sources)
    )
    written = sum(math.prod(shape) * tvm.DataType(dtype).itemsize for shape, dtype in problem.outputs)
    return predict_bytes_us(read + written, target)


def operands(problem: GroupProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """Empty: the kernel needs no operands."""
    return Operands()


def instantiate(problem: GroupProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments are the sources, then the results."""
    domains = domains_of(problem)
    parts = [_Part(problem, domain, config) for domain in domains]
    ctas = sum(part.ctas for part in parts)
    shared = max((part.shared_bytes for part in parts), default=0)

    def match(handles, specs, name):
        pairs = enumerate(zip(handles, specs))
        return [IRBuilder.name(f"{name}{i}", T.match_buffer(h, *spec, align=16)) for i, (h, spec) in pairs]

    def flat(buffers):
        """The same memory by the elements' positions."""
        return [T.decl_buffer((math.prod(x.shape),), x.dtype, data=x.data) for x in buffers]

    def work(sources, outputs, cta, thread):
        slot = shared_memory(shared, align=16) if shared else None
        read, written = flat(sources), flat(outputs)
        _choose(parts, 0, cta, lambda part, own: part.emit(read, written, own, thread, slot))

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
    ):
        handles = T.meta_var((x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15))
        sources = T.meta_var(match(handles, problem.inputs, "source"))
        outputs = T.meta_var(match((out0, out1, out2, out3), problem.outputs, "result"))

        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([config.threads])
        work(sources, outputs, cta, thread)

    absent = [f"x{i}" for i in range(len(problem.sources), MAX_SOURCES)]
    absent += [f"out{i}" for i in range(len(problem.results), MAX_RESULTS)]
    return finished(kernel, f"group_{config.threads}x{config.vectors_per_thread}", absent)


def _choose(parts, first_cta, cta, emit) -> None:
    """Emit each part for its CTAs."""
    part, *rest = parts
    own = cta - first_cta if first_cta else cta
    if not rest:
        emit(part, own)
        return
    end = first_cta + part.ctas
    branch(cta < end, lambda: emit(part, own), lambda: _choose(rest, end, cta, emit))


class _Part:
    """The work of a domain: its CTAs, and the code of one of their threads."""

    def __init__(self, problem: GroupProblem, domain: Domain, config: GroupConfig):
        self.problem, self.domain, self.config = problem, domain, config
        self.whole_vectors = bool(domain.shape) and domain.shape[-1] % VECTOR == 0
        self.elements = math.prod(domain.shape)
        self.geometry: RowGeometry | None = None
        self.idle = False
        self.shared_bytes = 0
        self.fast = fast_axis(problem, domain)
        self.is_tiled = False
        if domain.norm is None:
            self.vectors = -(-self.elements // VECTOR)
            self.is_tiled = self._is_tiled()
            self.ctas = -(-self._pieces // config.threads)
        else:
            wanted = -(-domain.n // VECTOR // config.vectors_per_thread)
            each = next(threads for threads in THREADS_PER_ROW if threads >= wanted)
            self.geometry = RowGeometry(domain.m, domain.n, RowConfig(each, config.threads // each))
            self.ctas = self.geometry.ctas
            # Threads that are left over work like those of one more row, and write nothing.
            self.idle = config.threads % each != 0
            if self.geometry.warps_per_row > 1:
                self.shared_bytes = self.geometry.shared_bytes + self.geometry.row_bytes

    def _is_tiled(self) -> bool:
        """Whether each thread computes VECTOR vectors, across what it reads."""
        fits = self.fast is not None and self.domain.shape[self.fast] % VECTOR == 0
        return fits and len(self.problem.values) <= MAX_TILE_VALUES

    @property
    def _tile_sizes(self) -> tuple[int, int]:
        """Tiles along the fast axis and vectors along the last one."""
        assert self.fast is not None
        return self.domain.shape[self.fast] // VECTOR, self.domain.n // VECTOR

    @property
    def _tile_threads(self) -> tuple[int, int]:
        """Neighbouring threads along these two axes: powers of two, where there are fewer tiles than that."""
        along_fast, along_last = (1 << (n - 1).bit_length() for n in self._tile_sizes)
        return min(TILE_THREADS[0], along_fast), min(TILE_THREADS[1], along_last)

    @property
    def _tiles(self) -> tuple[int, int]:
        """`_tile_sizes`, padded for `_tile_threads`."""
        along_fast, along_last = (-(-n // each) * each for n, each in zip(self._tile_sizes, self._tile_threads))
        return along_fast, along_last

    @property
    def _pieces(self) -> int:
        """Vectors, or tiles of VECTOR vectors, of which a thread computes one."""
        if not self.is_tiled:
            return self.vectors
        return math.prod(self._tiles) * (self.vectors // VECTOR // math.prod(self._tile_sizes))

    def emit(self, sources, outputs, cta, thread, slot) -> None:
        """The code of a thread of the part's CTA number `cta`."""
        if self.geometry is None or self.domain.norm is None:
            self._emit_vector(sources, outputs, cta * self.config.threads + thread)
        else:
            self._emit_row(self.geometry, self.domain.norm, sources, outputs, cta, thread, slot)

    def _emit_vector(self, sources, outputs, vector) -> None:
        """One vector of the results, wherever it is, or one tile."""
        symbols, last = Symbols(), self._pieces - 1
        ends = self.ctas * self.config.threads != self._pieces
        number = scalar("vector", vector)
        inside = [number <= last] if ends else []
        at = scalar("read", T.min(number, last)) if ends else number
        if self.whole_vectors:
            row_vectors = self.domain.n // VECTOR
            column = symbols.new("column", row_vectors)
            rows, indices = self.domain.places(symbols, column)
            if self.is_tiled:
                at, indices = self._decode_tile(symbols, rows, column, indices, at, inside)
            elif self.fast is not None:
                var, extent = rows.pop(self.domain.order.index(self.fast))
                symbols.registers[var] = scalar("fast", T.truncmod(at, extent))
                at = scalar("rest", T.truncdiv(at, extent))
            if not self.is_tiled:
                symbols.registers[column] = scalar("column", T.truncmod(at, row_vectors))
                at = scalar("row", T.truncdiv(at, row_vectors))
            _decode(symbols, rows, at)
        else:
            var = symbols.new("vector", self.vectors)
            symbols.registers[var] = at
            position = var * VECTOR + symbols.lane
            if self.elements % VECTOR:
                position = tirx.Min(position, tirx.IntImm("int32", self.elements - 1))
            indices = unflatten(position, self.domain.shape)
        emitter = Emitter(self.problem, sources, symbols)
        for row in range(VECTOR if self.is_tiled else 1):
            if self.is_tiled:
                symbols.registers[symbols.tile_row] = tirx.IntImm("int32", row)
            results = [(result, emitter.lanes(result, indices)) for result in self.domain.results]
            for result, lanes in results:
                self._store(outputs, result, lanes, indices, symbols, inside, number)

    def _decode_tile(self, symbols: Symbols, rows: list, column, indices: list, number, inside: list):
        """(the number of the other rows' place, indices) of tile `number`; rows keep only these.

        Conditions that it lies inside are added to `inside`.  Neighbouring threads are few along the axis that is read
        and more along the last one, so that both the reads and the writes of a warp are long.
        """
        var, extent = rows.pop(self.domain.order.index(self.fast))
        parts = []
        for size in (*self._tile_threads, *(n // each for n, each in zip(self._tiles, self._tile_threads))):
            parts.append(T.truncmod(number, size) if size > 1 else T.int32(0))
            number = T.truncdiv(number, size) if size > 1 else number
        counts = extent // VECTOR, self.domain.n // VECTOR
        tile = symbols.new("tile", counts[0])
        symbols.tile_row = symbols.new("tile_row", VECTOR)
        for name, register, axis in (("tile", tile, 0), ("column", column, 1)):
            place = scalar(name, parts[2 + axis] * self._tile_threads[axis] + parts[axis])
            if self._tiles[axis] > counts[axis]:  # the threads of a padded tile compute the last one, and write nothing
                inside.append(place < counts[axis])
                place = scalar(name, T.min(place, counts[axis] - 1))
            symbols.registers[register] = place
        indices = [substitute(index, {var: tile * VECTOR + symbols.tile_row}) for index in indices]
        return scalar("rest", number), indices

    def _emit_row(self, g: RowGeometry, norm: int, sources, outputs, cta, thread, slot) -> None:
        """A norm's row: its statistics first, then the results of the thread's vectors."""
        domain, symbols = self.domain, Symbols()
        value = self.problem.computed(norm)
        lane = thread % g.config.threads_per_row
        group = thread // g.config.threads_per_row
        row = scalar("row", cta * g.config.rows_per_cta + group)
        read = scalar("read", T.min(row, g.m - 1)) if g.rows_end or self.idle else row
        first = symbols.new("column", g.vectors)
        rows, indices = domain.places(symbols, first)
        _decode(symbols, rows, read)
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
        place = slot + group * g.row_bytes if slot is not None else None
        row_statistics(g, kind)(pair, values, lane, place)
        emitter.pairs[norm] = pair
        for v, column in enumerate(columns):
            at = [substitute(index, {first: column}) for index in indices]
            inside = [row < g.m] * g.rows_end + [group < g.config.rows_per_cta] * self.idle
            inside += [lane + v * g.config.threads_per_row < g.vectors] * (not g.always_inside(v))
            for result in domain.results:
                self._store(outputs, result, emitter.lanes(result, at), at, symbols, inside, None)

    def _store(self, outputs, result, lanes, indices, symbols, inside: list, vector) -> None:
        """Write a vector of a result where it lies inside."""
        dtype = self.problem.value(result).dtype
        position = symbols.analyzer.simplify(flatten(symbols.simplified(indices), self.domain.shape))
        buffers = [out for number, out in zip(self.problem.results, outputs) if number == result]
        first = symbols.first_of_neighbours(position)
        values = self._as_stored(lanes, dtype)
        if first is not None and dtype in DTYPES and symbols.is_multiple(first, VECTOR):
            at = scalar("at", symbols.in_registers(first))
            for out in buffers:
                _where(inside, lambda out=out: store_vector(dtype)(lambda i: out.ptr_to([at + i]), values))
            return
        for out in buffers:
            for i in range(VECTOR):
                conditions = inside
                if self.elements % VECTOR:
                    conditions = [vector * VECTOR + i < self.elements]
                put = T.cast(values[i], dtype) if str(values[i].ty.dtype) != dtype else values[i]
                _where(conditions, lambda out=out, i=i, put=put: assign(out, symbols.in_registers(position, i), put))

    @staticmethod
    def _as_stored(lanes, dtype: str):
        """VECTOR values to store; floats in one buffer."""
        if dtype not in DTYPES:
            return [lanes[i % len(lanes)] for i in range(VECTOR)]
        (buffer,) = local_buffers("stored", 1, VECTOR, register_dtype(dtype))
        for i in range(VECTOR):
            assign(buffer, i, lanes[i % len(lanes)])
        return buffer


@T.inline
def _guarded(condition, then):
    if condition:
        then()


def _where(conditions: list, then) -> None:
    if not conditions:
        then()
    else:
        _guarded(all_of(conditions), then)


def _decode(symbols: Symbols, rows, number) -> None:
    """Give the rows' variables their values for row `number`."""
    extents = [n for _, n in rows]
    for axis, (var, n) in enumerate(rows):
        inner = math.prod(extents[axis + 1 :])
        index = T.truncdiv(number, inner) if inner > 1 else number
        wraps = n > 1 and any(extent > 1 for extent in extents[:axis])
        symbols.registers[var] = scalar("index", T.truncmod(index, n) if wraps else index if n > 1 else T.int32(0))
