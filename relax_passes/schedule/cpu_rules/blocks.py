"""Questions and moves that the rules share: what a block is, which blocks to inline, how to vectorise."""

import math

import tvm_ffi
from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.ir import Call, TensorLoad

# A parallel launch costs about 5 µs, in which one core does about this many elementwise operations.
SERIAL_WORK = 16384
# The errors of a schedule's step: a precondition does not hold, or one that TVM only asserts (regions that it cannot
# compare).  After the second kind the schedule is unusable: so a step is tried on a copy, or the rule is given up.
REFUSALS = (s_tir.ScheduleError, InternalError)
# An expression with more loads than this is computed only once for each element.
MOST_REPEATED_LOADS = 4
# Calls that are too expensive to be repeated in each consumer.
DEAR_CALLS = frozenset(f"tirx.{name}" for name in ("exp", "exp2", "erf", "tanh", "sigmoid", "log", "pow", "sin", "cos"))


def top_blocks(sch) -> list:
    """The blocks right below the root, in the order in which they run."""
    return sch.get_child_blocks(sch.get_sblock("root"))


def is_reduction(sch, block) -> bool:
    """Whether the block reduces along any of its axes."""
    return any(axis.iter_type == tirx.IterVar.CommReduce for axis in sch.get(block).iter_vars)


def is_injective(sch, block) -> bool:
    """Only data-parallel axes and one plain store."""
    stmt = sch.get(block)
    return isinstance(stmt.body, tirx.BufferStore) and all(
        axis.iter_type == tirx.IterVar.DataPar for axis in stmt.iter_vars
    )


def extent(sch, loop) -> int | None:
    """The constant trip count of a loop; None where it is symbolic."""
    value = sch.get(loop).extent
    return int(value) if isinstance(value, tirx.IntImm) else None


def loads_in(node) -> list[TensorLoad]:
    """Every buffer load in an expression or statement."""
    loads = []
    tvm_ffi.structural_walk(node, (TensorLoad, loads.append), order="post")
    return loads


def calls_in(expr, names) -> list:
    """Every call of an intrinsic of one of these names."""
    calls = []

    def visit(call):
        if getattr(call.op, "name", "") in names:
            calls.append(call)

    tvm_ffi.structural_walk(expr, (Call, visit), order="post")
    return calls


def inline_injective(sch, keep=()) -> None:
    """Inline each injective block into its consumers, unless that repeats a dear call or the block is one of `keep`.

    A consumer that reads an element several times (a maximum that keeps NaN, GELU) repeats the expression that computes
    it.  A chain of such consumers would grow without end, so an expression with many loads is not repeated.
    """
    kept = {sch.get(block).name_hint for block in keep}
    for block in top_blocks(sch):
        stmt = sch.get(block)
        if stmt.name_hint in kept or not is_injective(sch, block):
            continue
        consumers = sch.get_consumers(block)
        repeats = sum(_reads(sch.get(consumer), stmt.body.buffer) for consumer in consumers) > 1
        is_dear = calls_in(stmt.body.value, DEAR_CALLS) or len(loads_in(stmt.body.value)) > MOST_REPEATED_LOADS
        if not consumers or repeats and is_dear:
            continue
        try_schedule(sch.compute_inline, block)


def _reads(stmt, buffer) -> int:
    """How often a block loads from a buffer."""
    return sum(load.source.same_as(buffer) for load in loads_in(stmt.body))


def spatial_sizes(sch, block) -> list:
    """The lengths of a block's data-parallel axes, without those of length one."""
    axes = [axis for axis in sch.get(block).iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    return [axis.dom.extent for axis in axes if not is_one(axis.dom.extent)]


def same_size(a, b) -> bool:
    """Whether two lengths are known to be equal."""
    return (int(a) == int(b)) if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) else a.same_as(b)


def is_large(func) -> bool:
    """Whether the largest parameter has enough elements to share among cores; symbolic lengths count as large."""
    sizes = []
    for buffer in func.params:
        shape = getattr(buffer.ty, "shape", ())
        sizes.append(math.prod(int(size) if isinstance(size, tirx.IntImm) else SERIAL_WORK for size in shape))
    return max(sizes, default=0) > SERIAL_WORK


def is_one(value) -> bool:
    """Whether an expression is the integer 1."""
    return isinstance(value, tirx.IntImm) and int(value) == 1


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor that is not above the limit."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)


def vectorize_last(sch, block, lanes: int) -> None:
    """Vectorise a block's last loop if vectors fill it; LLVM does better with a ragged or symbolic loop."""
    last = sch.get_loops(block)[-1]
    length = extent(sch, last)
    if length is not None and length % lanes == 0:
        sch.vectorize(sch.split(last, [None, lanes])[1])


def try_schedule(primitive, *args) -> bool:
    """Whether the primitive was legal; an illegal one changes nothing."""
    try:
        primitive(*args)
    except s_tir.ScheduleError:
        return False
    return True
