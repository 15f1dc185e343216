"""Any other function, block by block: inlining first, then outer loops in parallel and inner ones in vectors."""

from tvm import s_tir, tirx

from relax_passes.schedule.cpu_rules import blocks as blk
from relax_passes.schedule.cpu_rules.lanes import mark_lanes
from relax_passes.schedule.cpu_rules.products.contraction import match_contraction
from relax_passes.schedule.cpu_rules.products.matmul import tile_contraction
from relax_passes.schedule.cpu_rules.simd import Simd

# Elements of a one-dimensional chunk.
CHUNK = 4096


def schedule_generic(func, simd: Simd):
    """A schedule of a function whose blocks are products, reductions and injective maps; others keep their loops."""
    sch = s_tir.Schedule(func)
    products = [block for block in blk.top_blocks(sch) if match_contraction(sch, block) is not None]
    blk.inline_injective(sch, keep=[p for block in products for p in sch.get_producers(block)])
    for block in products:
        sch = _attempt(sch, tile_contraction, block, simd)
    is_parallel = blk.is_large(func)
    for block in blk.top_blocks(sch):
        if _shares_loops(sch, block):
            continue
        if blk.is_injective(sch, block):
            sch = _attempt(sch, _schedule_map, block, simd.lanes, is_parallel)
        elif blk.is_reduction(sch, block):
            sch = _attempt(sch, _schedule_reduction, block, simd.lanes, is_parallel)
    return sch


def _attempt(sch, rule, *args):
    """The schedule after the rule, or the unchanged schedule if one of the rule's steps is refused."""
    trial = sch.copy()
    try:
        rule(trial, *args)
    except blk.REFUSALS:
        return sch
    return trial


def _shares_loops(sch, block) -> bool:
    """Whether the block's nest is scheduled already: its outermost loop holds other blocks or is not serial."""
    loops = sch.get_loops(block)
    return not loops or len(sch.get_child_blocks(loops[0])) > 1 or sch.get(loops[0]).kind != tirx.ForKind.SERIAL


def _schedule_map(sch, block, lanes: int, is_parallel: bool) -> None:
    """Fuse all loops but the last, which is vectorised; a last loop that is alone or short is cut into chunks."""
    *outer, last = _long_loops(sch, block)
    length = blk.extent(sch, last)
    if outer and length is not None and length < lanes:
        outer, last = [], sch.fuse(*outer, last)
        length = blk.extent(sch, last)
    if outer:
        task = sch.fuse(*outer)
    elif length is None:
        task = last
    else:
        task, last = sch.split(last, [None, blk.largest_divisor(length, CHUNK)])
    if is_parallel:
        sch.parallel(task)
    if not _branches(sch.get(block)) and task is not last:
        blk.vectorize_last(sch, block, lanes)


def _schedule_reduction(sch, block, lanes: int, is_parallel: bool) -> None:
    """Reduce over a contiguous axis in lanes; over others, make the last kept axis innermost, for LLVM to vectorise."""
    kept = sum(axis.iter_type == tirx.IterVar.DataPar for axis in sch.get(block).iter_vars)
    loops = sch.get_loops(block)
    spatial, reduced = loops[:kept], loops[kept:]
    if not spatial:
        mark_lanes(sch, block, lanes)
        return
    in_lanes = mark_lanes(sch, block, lanes)
    outer, last = (spatial, None) if in_lanes else (spatial[:-1], spatial[-1])
    task = sch.fuse(*outer) if outer else sch.add_unit_loop(last)
    if is_parallel:
        sch.parallel(task)
    if not in_lanes:
        sch.reorder(*reduced, last)
        sch.decompose_reduction(block, reduced[0])


def _long_loops(sch, block) -> list:
    """The loops that run more than once; the first loop where none does."""
    loops = sch.get_loops(block)
    return [loop for loop in loops if not blk.is_one(sch.get(loop).extent)] or loops[:1]


def _branches(stmt) -> bool:
    """Whether the value depends on a condition, which the vectoriser would turn into scalar code: LLVM does better."""
    return bool(blk.calls_in(stmt.body.value, ("prim.if_then_else",)))
