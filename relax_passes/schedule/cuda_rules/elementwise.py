"""A schedule rule for CUDA: large elementwise functions, several elements a thread.

dlight gives a thread one element, which is two bytes in half precision: too few bytes are in flight to use the memory's
bandwidth.
"""

from tvm import s_tir
from tvm.s_tir import dlight
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import try_inline

THREADS = 256
UNROLLED = 8  # elements of a thread, a CTA's width apart, so that a warp reads neighbours
LEAST_ELEMENTS = 1 << 20  # fewer leave multiprocessors idle


class Elementwise(dlight.ScheduleRule):
    """For functions on a large tensor that become one block without a reduction; None for anything else."""

    def apply(self, func, _target, _tunable):
        schedule = s_tir.Schedule(func)
        blocks = normalize_prim_func(schedule)
        if not blocks:
            return None
        *others, last = try_inline(schedule, blocks)
        if others or {iteration.kind for iteration in last.iters} != {"S"}:
            return None
        loop = schedule.fuse(*schedule.get_loops(last.block_rv))
        if int(schedule.get(loop).extent) < LEAST_ELEMENTS:
            return None
        ctas, unrolled, threads = schedule.split(loop, [None, UNROLLED, THREADS])
        schedule.bind(ctas, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
        schedule.unroll(unrolled)
        return schedule
