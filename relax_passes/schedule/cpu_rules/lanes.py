"""Reductions over a contiguous axis, vectorised: many partial results side by side, folded at the end.

LLVM may not reorder floating-point sums, so a plain loop stays scalar.  A schedule's `rfactor` gives partial results,
but `compute_at` then loses the guard of a ragged axis: wrong numbers.  So a rule only marks the loop, and this rewrite
runs when schedules are done.
"""

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad, Var

from relax_passes.schedule.cpu_rules.blocks import loads_in

MARK = "stof.lanes"
COMBINERS = {tirx.Add: lambda a, b: a + b, tirx.Max: tirx.max, tirx.Min: tirx.min}


def reduces_contiguously(stmt) -> bool:
    """Whether a reduction block's last axis is a contiguous axis of what it reads."""
    return _is_contiguous(stmt.iter_vars[-1].var, stmt.body)


def mark_lanes(sch, block, lanes: int) -> bool:
    """Mark a contiguous reduction for `expand_lanes`; False where it is too short or not a sum, max or min."""
    stmt = sch.get(block)
    loops = sch.get_loops(block)
    innermost = sch.get(loops[-1])
    realize, length = innermost.body, innermost.extent
    if _update(stmt) is None or not reduces_contiguously(stmt) or not isinstance(realize, s_tir.SBlockRealize):
        return False
    if not realize.iter_values[-1].same_as(innermost.loop_var):
        return False
    if isinstance(length, tirx.IntImm) and int(length) < lanes:
        return False
    bindings = [value for axis, value in zip(stmt.iter_vars, realize.iter_values, strict=True) if _is_reduced(axis)]
    first = next(loop for loop in loops if any(_uses(value, sch.get(loop).loop_var) for value in bindings))
    # Four registers of partial results hide the latency of an addition.
    is_long = isinstance(length, tirx.IntImm) and int(length) >= 8 * lanes
    sch.annotate(first, MARK, 4 * lanes if is_long else lanes)
    return True


def expand_lanes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace every marked reduction by a block that reduces in lanes."""
    body = tvm_ffi.structural_map(func.body, (tirx.For, _expand_loop), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _expand_loop(loop):
    if MARK not in loop.annotations:
        return loop
    nest = _nest(loop)
    realize = nest[-1].body
    block = realize.block
    lanes, (combiner, value) = int(loop.annotations[MARK]), _update(block)
    store = block.body
    partial = tirx.decl_buffer((lanes,), str(store.buffer.ty.dtype), f"{block.name_hint}_lanes")
    bound = dict(zip((axis.var for axis in block.iter_vars), realize.iter_values, strict=True))
    reduced = {axis.var: bound[axis.var] for axis in block.iter_vars if _is_reduced(axis)}

    def combine_at(lane, index):
        """partial[lane] takes in the value at this index of the innermost axis."""
        at = {**reduced, block.iter_vars[-1].var: index}
        return tirx.BufferStore(partial, combiner(partial[lane], _substitute(value, at)), [lane])

    length = nest[-1].extent
    whole = tirx.floordiv(length, lanes)
    update = tirx.SeqStmt(
        [
            _loop(whole, lambda k: _loop(lanes, lambda lane: combine_at(lane, k * lanes + lane), vector=True)),
            _loop(length - whole * lanes, lambda k: combine_at(0, whole * lanes + k)),
        ]
    )
    for outer in reversed(nest[:-1]):
        update = tirx.For(outer.loop_var, outer.min, outer.extent, outer.kind, update)
    folds = []
    while lanes > 1:
        lanes //= 2
        folds.append(_fold(partial, combiner, lanes))
    identity = block.init.value
    init = _loop(partial.ty.shape[0], lambda lane: tirx.BufferStore(partial, identity, [lane]), vector=True)
    result = tirx.BufferStore(store.buffer, partial[0], store.indices)
    body = tirx.SeqStmt([init, update, *folds, result])
    kept = [axis for axis in block.iter_vars if not _is_reduced(axis)]
    return _block(block, kept, [bound[axis.var] for axis in kept], body, partial, realize.predicate)


def _fold(partial, combiner, half: int):
    """The upper half of the lanes joins the lower."""
    return _loop(
        half,
        lambda lane: tirx.BufferStore(partial, combiner(partial[lane], partial[lane + half]), [lane]),
        vector=half > 1,
    )


def _block(block, axes, values, body, partial, predicate):
    """A block of these axes around the body, with the accesses that the body makes."""
    name = f"{block.name_hint}_in_lanes"
    bare = s_tir.SBlock(axes, [], [], name, body, alloc_buffers=[partial])
    buffers = {region.source: region.source for region in (*block.reads, *block.writes)}
    reads, writes = s_tir.analysis.get_sblock_access_region(bare, buffers)[:2]
    whole = s_tir.SBlock(axes, reads, writes, name, body, alloc_buffers=[partial])
    return s_tir.SBlockRealize(values, predicate, whole)


def _loop(extent, body, vector: bool = False):
    index = tirx.Var("k", "int64")
    kind = tirx.ForKind.VECTORIZED if vector else tirx.ForKind.SERIAL
    return tirx.For(index, 0, extent, kind, body(index))


def _substitute(expr, values: dict):
    """The expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (Var, lambda var: values.get(var, var)))


def _update(block):
    """(combiner, value) of C = combiner(C, value); None for another body or combiner."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or type(store.value) not in COMBINERS:
        return None
    accumulator, value = store.value.a, store.value.b
    if not isinstance(accumulator, TensorLoad) or not accumulator.source.same_as(store.buffer):
        return None
    return COMBINERS[type(store.value)], value


def _nest(loop) -> list:
    """The perfect nest of loops from this one to its block."""
    nest = [loop]
    while isinstance(nest[-1].body, tirx.For):
        nest.append(nest[-1].body)
    return nest


def _is_reduced(axis) -> bool:
    return axis.iter_type == tirx.IterVar.CommReduce


def _is_contiguous(var, stmt) -> bool:
    """Whether every load that moves with the variable moves by one element."""
    moving = [load.indices for load in loads_in(stmt) if any(_uses(index, var) for index in load.indices)]
    return bool(moving) and all(
        _is_offset(last, var) and not any(_uses(index, var) for index in others) for *others, last in moving
    )


def _is_offset(index, var) -> bool:
    """var, or var plus something that does not use it."""
    if isinstance(index, tirx.Add):
        return any(_is_offset(a, var) and not _uses(b, var) for a, b in ((index.a, index.b), (index.b, index.a)))
    return index.same_as(var)


def _uses(expr, var) -> bool:
    found = []
    tvm_ffi.structural_walk(expr, (Var, found.append), order="post")
    return any(other.same_as(var) for other in found)
