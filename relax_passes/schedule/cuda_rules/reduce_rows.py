"""A schedule rule for CUDA: reductions along the last dimensions, a CTA for each row.

A reduction to one number has a single row.  dlight's rules spread the dimensions that are not reduced over threads, so
they leave such reductions to a single thread for each row.
"""

from tvm.s_tir import dlight

from relax_passes.schedule.cuda_rules.one_reduction import one_reduction

THREADS = 1024
WARP = 32
UNROLLED = 8  # elements a thread reads at once
LEAST_ELEMENTS = 256  # in each of several rows, for CTAs to be worth it


class ReduceRows(dlight.ScheduleRule):
    """For elementwise blocks followed by one reduction; None for anything else."""

    def apply(self, func, _target, _tunable):
        if (found := one_reduction(func)) is None:
            return None
        schedule, _, loops, kinds = found
        spatial = kinds.index("R")
        if "S" in kinds[spatial:]:
            return None
        row = schedule.fuse(*loops[spatial:])
        first = schedule.fuse(*loops[:spatial]) if spatial else schedule.add_unit_loop(row)
        rows, elements = (int(schedule.get(loop).extent) for loop in (first, row))
        if rows > 1 and elements < LEAST_ELEMENTS:
            return None
        threads = THREADS
        while threads > WARP and threads * UNROLLED > 2 * elements:
            threads //= 2
        _, thread, _ = schedule.split(row, [None, threads, UNROLLED])
        schedule.bind(thread, "threadIdx.x")
        schedule.bind(first, "blockIdx.x")
        return schedule
