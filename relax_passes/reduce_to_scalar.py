"""A schedule rule for CUDA: the reduction of a whole tensor to one number by the threads of one CTA.

dlight's rules spread what is not reduced over threads, so they leave such a reduction to a single thread.
"""

from tvm import s_tir
from tvm.s_tir import dlight
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import try_inline

THREADS = 1024
UNROLLED = 8  # elements a thread reads at once


class ReduceToScalar(dlight.ScheduleRule):
    """For elementwise blocks and then one reduction over all axes; None for anything else."""

    def apply(self, func, _target, _tunable):
        schedule = s_tir.Schedule(func)
        blocks = normalize_prim_func(schedule)
        if not blocks:
            return None
        *others, last = try_inline(schedule, blocks)
        kinds = {iteration.kind for iteration in last.iters if iteration.dom != 1}
        if others or kinds != {"R"}:
            return None
        loop = schedule.fuse(*schedule.get_loops(last.block_rv))
        rounds, threads, _elements = schedule.split(loop, [None, THREADS, UNROLLED])
        schedule.bind(threads, "threadIdx.x")
        schedule.bind(schedule.add_unit_loop(rounds), "blockIdx.x")
        return schedule
