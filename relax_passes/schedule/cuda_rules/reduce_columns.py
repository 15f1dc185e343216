"""A schedule rule for CUDA: reductions along dimensions before the last, a thread for each column.

Neighbouring threads read neighbouring elements of a row.  dlight's rules give sixteen columns to a CTA.
"""

import math

import tvm
import tvm_ffi
from tvm.s_tir import dlight

from relax_passes.schedule.cuda_rules.one_reduction import one_reduction

THREADS = 256
UNROLLED = 8  # rows that a thread reads at once
LEAST_COLUMNS = 1 << 13  # that keep the multiprocessors busy


class ReduceColumns(dlight.ScheduleRule):
    """For elementwise blocks followed by one reduction that leaves enough columns; None for anything else."""

    def apply(self, func, _target, _tunable):
        if (found := one_reduction(func)) is None or "S" not in found.kinds:
            return None
        schedule, block_rv, loops, kinds = found
        block = schedule.get(block_rv)
        if not block.reads or not _reads_rows(block, kinds):
            return None
        spatial, reduced = ([loop for loop, kind in zip(loops, kinds) if kind == wanted] for wanted in "SR")
        schedule.reorder(*spatial, *reduced)
        columns, rows = schedule.fuse(*spatial), schedule.fuse(*reduced)
        if int(schedule.get(columns).extent) < LEAST_COLUMNS:
            return None
        ctas, threads = schedule.split(columns, [None, THREADS])
        schedule.bind(ctas, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
        _, unrolled = schedule.split(rows, [None, UNROLLED])
        schedule.unroll(unrolled)
        return schedule


def _reads_rows(block, kinds: str) -> bool:
    """Whether a block leaves the last dimension, but for those of one element, of the largest tensor that it reads."""
    read = max(block.reads, key=lambda read: math.prod(int(n) for n in read.source.shape))
    used: list[tvm.tirx.Var] = []
    lengths = [int(n) for n in read.source.shape]
    last = max((axis for axis, n in enumerate(lengths) if n > 1), default=0)
    tvm_ffi.structural_walk(read.region[last].min, (tvm.tirx.Var, used.append), order="post")
    reduced = [iteration.var for iteration, kind in zip(block.iter_vars, kinds) if kind == "R"]
    return bool(used) and not any(var.same_as(other) for var in used for other in reduced)
