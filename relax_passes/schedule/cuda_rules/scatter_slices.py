"""A schedule rule for CUDA: the scatter kernel (tir_kernels/scatter.py), a thread for each slice of the result.

dlight's analyses take its block, which walks a whole slice, for a reduction and fail.
"""

from tvm import s_tir
from tvm.s_tir import dlight

from tir_kernels.scatter import is_scatter

THREADS = 128


class ScatterSlices(dlight.ScheduleRule):
    """For the scatter kernel alone; None for anything else."""

    def apply(self, func, _target, _tunable):
        if not is_scatter(func):
            return None
        schedule = s_tir.Schedule(func)
        loop = schedule.fuse(*schedule.get_loops(schedule.get_sblock("scatter")))
        ctas, threads = schedule.split(loop, [None, THREADS])
        schedule.bind(ctas, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
        return schedule
