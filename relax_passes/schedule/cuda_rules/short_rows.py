"""A schedule rule for CUDA: several reductions along rows of few elements, such as a softmax, a thread for each row.

dlight's rule gives each row a CTA of 256 threads, of which those of the row's elements work.
"""

from tvm import s_tir, tirx
from tvm.s_tir import dlight
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import try_inline_contiguous_spatial

THREADS = 128
MOST_ELEMENTS = 16  # of a row: they lie in registers
LEAST_ROWS = 1024  # so many threads hide what each waits for


class ShortRows(dlight.ScheduleRule):
    """For blocks that share all their dimensions but the last, which some of them reduce; None for anything else."""

    def apply(self, func, _target, _tunable):
        schedule = s_tir.Schedule(func)
        blocks = normalize_prim_func(schedule)
        blocks = try_inline_contiguous_spatial(schedule, blocks) if blocks else None
        if not blocks or not any("R" in block.dom_kind() for block in blocks[:-1]):
            return None
        if not all(isinstance(iteration.dom, tirx.IntImm | int) for block in blocks for iteration in block.iters):
            return None
        *shared, last = [[int(iteration.dom) for iteration in block.iters] for block in blocks]
        leading = last[:-1]
        rows, elements = 1, last[-1] if last else 0
        for n in leading:
            rows *= n
        fits = all(extents in ([*leading, elements], leading) for extents in shared)
        kinds = {block.dom_kind() for block in blocks}
        if not fits or elements > MOST_ELEMENTS or rows < LEAST_ROWS or not kinds <= _kinds(len(leading)):
            return None
        try:
            return _scheduled(schedule, blocks)
        except s_tir.ScheduleError:  # a block reads other rows than its own
            return None


def _scheduled(schedule, blocks):
    """Each row a thread, in which every block is computed."""
    loops = schedule.get_loops(blocks[-1].block_rv)
    first, thread = schedule.split(schedule.fuse(*loops[:-1]), [None, THREADS])
    schedule.bind(first, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    for block in reversed(blocks[:-1]):
        for number, _ in enumerate(schedule.get(block.block_rv).writes):  # a maximum and its place
            schedule.set_scope(block.block_rv, number, "local")
        schedule.compute_at(block.block_rv, thread, preserve_unit_loops=True)
    return schedule


def _kinds(leading: int) -> set[str]:
    return {"S" * leading + end for end in ("S", "R", "")}
