"""Softmax, normalisations and other chains of row reductions: one parallel loop over rows, a row at a time in L1."""

from tvm import s_tir

from relax_passes.schedule.cpu_rules import blocks as blk
from relax_passes.schedule.cpu_rules.lanes import mark_lanes, reduces_contiguously
from relax_passes.schedule.cpu_rules.products.contraction import match_contraction
from relax_passes.schedule.cpu_rules.simd import Simd


def schedule_rows(func, simd: Simd):
    """A schedule of a function with one output whose reductions are contiguous and have the same rows; else None."""
    sch = s_tir.Schedule(func)
    reductions = [block for block in blk.top_blocks(sch) if blk.is_reduction(sch, block)]
    rows = _common_rows(sch, reductions)
    if not rows or not all(reduces_contiguously(sch.get(b)) and not match_contraction(sch, b) for b in reductions):
        return None
    statistics = [b for b in blk.top_blocks(sch) if len(blk.spatial_sizes(sch, b)) <= len(rows)]
    blk.inline_injective(sch, keep=statistics)
    *blocks, output = blk.top_blocks(sch)
    if any(not sch.get_consumers(block) for block in blocks):
        return None
    if any(not _starts_with(blk.spatial_sizes(sch, block), rows) for block in (*blocks, output)):
        return None
    row = _fuse_rows(sch, output, len(rows))
    for block in reversed(blocks):
        if not blk.try_schedule(sch.compute_at, block, row):
            return None
    for block in (*blocks, output):
        if blk.is_reduction(sch, block):
            mark_lanes(sch, block, simd.lanes)
        elif len(blk.spatial_sizes(sch, block)) > len(rows):
            blk.vectorize_last(sch, block, simd.lanes)
    if blk.is_large(func):
        sch.parallel(row)
    return sch


def _common_rows(sch, reductions) -> list | None:
    """The sizes of the axes that every reduction keeps; None where they differ or there is no reduction."""
    sizes = [blk.spatial_sizes(sch, block) for block in reductions]
    same = sizes and all(len(s) == len(sizes[0]) and _starts_with(s, sizes[0]) for s in sizes)
    return sizes[0] if same else None


def _starts_with(sizes, rows) -> bool:
    return len(sizes) >= len(rows) and all(blk.same_size(a, b) for a, b in zip(sizes, rows, strict=False))


def _fuse_rows(sch, output, count: int):
    """One loop over the rows of the output: its first `count` loops that are longer than one."""
    loops = sch.get_loops(output)
    long = [i for i, loop in enumerate(loops) if not blk.is_one(sch.get(loop).extent)]
    return sch.fuse(*loops[: long[count - 1] + 1])
