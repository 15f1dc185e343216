"""A reduction along any axes on CUDA (sm_80 and up) in one kernel, with elementwise operators before and after.

The kernel is bound by memory: threads read vectors of 8 neighbours, of one output where the last axis is reduced, of 8
outputs where it stays, and join them in float32.  Threads of an output exchange what they found by shuffles and shared
memory; where outputs are few, CTAs share them, and the last one to arrive joins the parts.  The order is fixed: no
atomic operation adds, so equal inputs give equal bits.
"""

import math
from functools import cache

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, scalar, shared_memory
from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.domains import reads_of
from tir_kernels.fusion.group.emit import Emitter, all_of, assign, register_dtype
from tir_kernels.fusion.group.indices import flatten, unflatten
from tir_kernels.fusion.group.limits import bytes_moved, refusal_of_values
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.store import store_lanes, store_one, where
from tir_kernels.fusion.group.symbols import Symbols, depends
from tir_kernels.fusion.reduce.combine import Combiner, repeated
from tir_kernels.fusion.reduce.geometry import UNROLLED, ReduceConfig, ReduceGeometry, reduce_configs
from tir_kernels.fusion.reduce.places import Places
from tir_kernels.fusion.reduce.reduction import Reduction, has_reduction, reduction_of
from tir_kernels.fusion.rows.cost import predict_bytes_us
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import VECTOR
from tir_kernels.template import Operands

NAME = "reduce"
TARGET_KIND = "cuda"
MAX_SOURCES, MAX_RESULTS = 8, 4
Config = ReduceConfig
LOAD_US = 0.6  # from memory
ARRIVAL_US = 1.5  # for the last CTA to find the parts of the others


def unsupported(problem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if not isinstance(problem, GroupProblem) or not has_reduction(problem):
        return "it holds no reduction"
    return _refusal(problem)


@cache
def _refusal(problem: GroupProblem) -> str | None:
    if why := refusal_of_values(problem, MAX_SOURCES, MAX_RESULTS):
        return why
    try:
        reduction_of(problem)
    except UnsupportedError as error:
        return str(error)
    return None


def configs(problem: GroupProblem, target: tvm.target.Target) -> list[Config]:
    """Configurations that are worth trying; the default first."""
    return reduce_configs(reduction_of(problem), gpu_of(target))


def predict_us(problem: GroupProblem, config: Config, target: tvm.target.Target, forms: None = None) -> float:
    """Predicted microseconds of the kernel: what it reads once, or the loads that a thread waits for if longer."""
    g, gpu = _geometry(problem, config), gpu_of(target)
    waves = -(-g.ctas * g.threads // (gpu.multiprocessors * gpu.threads))
    rounds = -(-g.steps_of_split // (config.sharing * UNROLLED))
    start = predict_bytes_us(0, target)
    moving = predict_bytes_us(bytes_moved(problem), target) - start
    return start + max(moving, waves * rounds * LOAD_US) + ARRIVAL_US * (config.splits > 1)


def operands(problem: GroupProblem, config: Config, target: tvm.target.Target, mask: None = None) -> Operands:
    """A workspace of what splits found, in words, and arrival counters; empty without splits."""
    g = _geometry(problem, config)
    return Operands(workspace=((g.partials, "uint32"), ((g.tiles,), "uint32")) if config.splits > 1 else ())


def instantiate(problem: GroupProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments are the sources, the workspace, then the results."""
    g = _geometry(problem, config)
    is_split = config.splits > 1

    def match(handles, specs, name):
        pairs = enumerate(zip(handles, specs))
        return [IRBuilder.name(f"{name}{i}", T.match_buffer(h, *spec, align=16)) for i, (h, spec) in pairs]

    def flat(buffers):
        """The same memory by the elements' positions."""
        return [T.decl_buffer((math.prod(x.shape),), x.dtype, data=x.data) for x in buffers]

    def work(sources, outputs, partials, arrivals, cta, thread):
        base = shared_memory(g.shared_bytes, align=16)
        _Thread(problem, g, cta, thread, base).emit(flat(sources), flat(outputs), partials, arrivals)

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
        partials_handle: T.Optional(T.handle),
        arrivals_handle: T.Optional(T.handle),
        out0: T.Optional(T.handle),
        out1: T.Optional(T.handle),
        out2: T.Optional(T.handle),
        out3: T.Optional(T.handle),
    ):
        sources = T.meta_var(match((x0, x1, x2, x3, x4, x5, x6, x7), problem.inputs, "source"))
        partials = T.meta_var(match_optional("partials", partials_handle, g.partials, "uint32", align=16))
        arrivals = T.meta_var(match_optional("arrivals", arrivals_handle, (g.tiles,), "uint32"))
        outputs = T.meta_var(match((out0, out1, out2, out3), problem.outputs, "result"))

        T.device_entry()
        # With room for more registers than nvcc takes by itself, which it would rather spill.
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.resident_ctas})
        cta = T.cta_id([g.ctas])
        thread = T.thread_id([g.threads])
        work(sources, outputs, partials, arrivals, cta, thread)

    absent = [f"x{i}" for i in range(len(problem.sources), MAX_SOURCES)]
    absent += [f"out{i}" for i in range(len(problem.results), MAX_RESULTS)]
    absent += [] if is_split else ["partials_handle", "arrivals_handle"]
    return finished(kernel, f"reduce_{config.items}x{config.sharing}x{config.splits}", absent)


def _geometry(problem: GroupProblem, config: Config) -> ReduceGeometry:
    reduction = reduction_of(problem)
    return ReduceGeometry(reduction, config, tvm.DataType(_dtype(problem, reduction)).itemsize)


def _dtype(problem: GroupProblem, reduction: Reduction) -> str:
    """The dtype in which a reduction is accumulated."""
    return register_dtype(problem.value(reduction.number).dtype)


def _emitter(problem: GroupProblem, sources, symbols: Symbols) -> Emitter:
    """An emitter whose vectors may lie in a row of fewer elements: lanes past its end repeat the last one."""
    return Emitter(problem, sources, symbols, any_order=False)


class _Thread:
    """The code of one thread: its item of its CTA's tile, and its part of that item's steps."""

    def __init__(self, problem: GroupProblem, g: ReduceGeometry, cta, thread, base):
        self.problem, self.g, self.r = problem, g, g.reduction
        self.symbols = Symbols()
        splits, sharing, items = g.config.splits, g.config.sharing, g.config.items
        self.tile = scalar("tile", T.truncdiv(cta, splits)) if splits > 1 else cta
        self.split = scalar("split", T.truncmod(cta, splits)) if splits > 1 else T.int32(0)
        if self.r.along:  # neighbouring threads share an item
            self.item, self.part = T.truncdiv(thread, sharing), T.truncmod(thread, sharing)
        else:
            self.item, self.part = T.truncmod(thread, items), T.truncdiv(thread, items)
        self.item, self.part = scalar("item", self.item), scalar("part", self.part)
        self.number = scalar("number", self.tile * items + self.item)
        self.owner = [self.part == 0] * (sharing > 1) + [self.number < self.r.items] * (self.r.items % items != 0)
        self.combiner = Combiner(g, _dtype(problem, self.r), thread, self.item, self.part, base)
        self.kept = Places(self.symbols, self.r, self.r.kept, not self.r.along)
        self.steps = Places(self.symbols, self.r, self.r.reduced, self.r.along)
        ends = self.r.items % items != 0
        self.kept.move(scalar("read", T.min(self.number, self.r.items - 1)) if ends else self.number)

    def emit(self, sources, outputs, partials, arrivals) -> None:
        """Walk the steps, join what all found, and write the results."""
        (acc,) = local_buffers("acc", 1, VECTOR, self.combiner.dtype)
        (word,) = local_buffers("last", 1, 1, "uint32")
        self.combiner.fill(acc, VECTOR)
        self._walk(acc, sources)
        if self.r.along:
            self._join_lanes(acc)
        self.combiner.in_cta(acc)
        finish = lambda: where(self.owner, lambda: self._finish(acc, sources, outputs))
        if self.g.config.splits == 1:
            finish()
            return
        self.combiner.between_ctas(acc, partials, arrivals, word, self.tile, self.split, self.owner)
        where([word[0] != T.uint32(0)], finish)

    # -- the walk --------------------------------------------------------------------------------------------------

    def _walk(self, acc, sources) -> None:
        """Join the values of the thread's steps, `sharing` apart, of its CTA's split."""
        g, sharing = self.g, self.g.config.sharing
        self._read_once(sources)
        rounds, rest = divmod(g.steps_of_split, sharing)
        begin = scalar("begin", self.split * g.steps_of_split + self.part)
        end = None
        if not g.is_even:
            end = scalar("end", T.min((self.split + 1) * g.steps_of_split, self.r.steps))

        def some(first, count):
            def body(i):
                steps = [scalar("step", begin + (first + i * count + u) * sharing) for u in range(count)]
                self._join_steps(acc, sources, [(step, None if end is None else step < end) for step in steps])

            return body

        if rounds // UNROLLED:
            repeated(rounds // UNROLLED, some(0, UNROLLED))
        done = rounds // UNROLLED * UNROLLED
        if rounds > done:
            repeated(rounds - done, some(done, 1))
        if rest:
            step = scalar("step", begin + rounds * sharing)
            inside = self.part < rest
            self._join_steps(acc, sources, [(step, inside if end is None else T.And(inside, step < end))])

    def _read_once(self, sources) -> None:
        """Load what all steps of the thread read alike; the rest is `read_each`."""
        self.once, self.read_each = _emitter(self.problem, sources, self.symbols), []
        for number, at, position in reads_of(self.problem, [(self.r.argument, self._indices())], self.symbols):
            if any(depends(position, var) for var in self.steps.variables):
                self.read_each.append((number, at))
            else:
                self.once.lanes(number, at)

    def _indices(self) -> list:
        """The indices of what is reduced, in symbols."""
        places = self.kept.indices | self.steps.indices
        return [places[axis] for axis in range(len(self.r.shape))]

    def _join_steps(self, acc, sources, steps: list) -> None:
        """Join what is at some (step, condition), where the condition holds: all loads first, so that they overlap."""
        loaded = []
        for step, condition in steps:
            # Where a condition does not hold, a place that exists is read for nothing.
            self.steps.move(step if condition is None else scalar("at_step", T.min(step, self.r.steps - 1)))
            emitter = _emitter(self.problem, sources, self.symbols)
            emitter.known |= self.once.known
            for number, at in self.read_each:
                emitter.lanes(number, at)
            loaded.append((emitter, dict(self.symbols.registers)))
        for (emitter, registers), (step, condition) in zip(loaded, steps):
            self.symbols.registers = registers
            lanes = emitter.lanes(self.r.argument, self._indices())
            for lane in range(VECTOR):
                conditions = [] if condition is None else [condition]
                if self.r.along and self.r.elements % VECTOR:
                    conditions.append(step * VECTOR + lane < self.r.elements)
                self.combiner.add(acc, lane, lanes[lane % len(lanes)], all_of(conditions) if conditions else None)

    def _join_lanes(self, acc) -> None:
        """Join a thread's eight numbers in pairs: the first then holds all."""
        distance = VECTOR // 2
        while distance:
            for lane in range(distance):
                assign(acc, lane, self.combiner.join(acc[lane], acc[lane + distance]))
            distance //= 2

    # -- the results -----------------------------------------------------------------------------------------------

    def _finish(self, acc, sources, outputs) -> None:
        """Compute and write the results of the thread's item."""
        problem, r, symbols = self.problem, self.r, self.symbols
        found = [acc[lane] for lane in range(self.g.lanes)]
        if r.kind == "mean":
            found = [value / T.float32(r.elements) for value in found]
        emitter = _emitter(problem, sources, symbols)
        emitter.given[r.number] = found
        kept = self.kept.indices
        places = [tirx.IntImm("int32", 0) if axis in r.axes else kept[axis] for axis in range(len(r.shape))]
        shape = [1 if axis in r.axes else n for axis, n in enumerate(r.shape)]
        for result in dict.fromkeys(problem.results):
            whole = problem.value(result).shape
            indices = unflatten(symbols.analyzer.simplify(flatten(places, shape)), whole)
            if tuple(whole) == tuple(shape):
                indices = places
            elif tuple(whole) == tuple(n for axis, n in enumerate(r.shape) if axis not in r.axes):
                indices = [kept[axis] for axis in sorted(kept)]
            lanes = emitter.lanes(result, indices)
            if r.along:
                store_one(problem, result, lanes[0], indices, outputs, symbols)
            else:
                limit = self.number if r.outputs % VECTOR else None
                store_lanes(problem, result, lanes, indices, outputs, symbols, [], limit)
