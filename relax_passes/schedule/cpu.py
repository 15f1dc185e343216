"""From Relax operators to scheduled PrimFuncs for LLVM, for operators without a kernel of this project."""

import tvm
from tvm import relax, tirx

from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.legalizations.grouped_products import CPU_GROUPED_PRODUCTS
from relax_passes.schedule.apply_tuning_records import ApplyTuningRecords, is_unscheduled
from relax_passes.schedule.cpu_rules import blocks as blk
from relax_passes.schedule.cpu_rules.generic import schedule_generic
from relax_passes.schedule.cpu_rules.lanes import expand_lanes
from relax_passes.schedule.cpu_rules.legalize_half import HALF_LEGALIZATIONS
from relax_passes.schedule.cpu_rules.long_sums import LONG_SUMS, WidenScans
from relax_passes.schedule.cpu_rules.plain import keep_plain
from relax_passes.schedule.cpu_rules.products.packed_weights import PackWeights
from relax_passes.schedule.cpu_rules.repeated_calls import bind_repeated_calls
from relax_passes.schedule.cpu_rules.rows import schedule_rows
from relax_passes.schedule.cpu_rules.simd import simd_of
from relax_passes.schedule.cpu_rules.vector_math import expand_math
from relax_passes.schedule.cpu_rules.widen_bf16 import widen_bf16
from relax_passes.schedule.fused_functions import fused_functions
from relax_passes.schedule.grouped_products import schedule_grouped
from relax_passes.schedule.repairs import REPAIRS
from relax_passes.schedule.segment_schedules import (
    PLAIN_LOOPS,
    SCHEDULE,
    DescribeSchedules,
    NoteSegmentFunctions,
    rule_name,
)
from relax_passes.tuned_choices import TunedChoices

RULES = (schedule_grouped, schedule_rows, schedule_generic)


@tvm.transform.module_pass(opt_level=0, name="ScheduleForCPU")
class ScheduleForCPU:
    """Give every unscheduled TensorIR function of a module a parallel, vectorised schedule.

    Functions that carry `tirx.is_scheduled`, and those that are not schedulable TensorIR, stay as they are.  A function
    that no rule covers keeps its loops: it is slow, never wrong.
    """

    def __init__(self, target):
        self.simd = simd_of(target)

    def transform_module(self, mod, _ctx):
        scheduled = {}
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and is_unscheduled(func):
                done, by = _schedule(func, self.simd)
                done = keep_plain(done, finish(func))
                scheduled[name] = done.with_attrs({"tirx.is_scheduled": True, SCHEDULE: by})
        mod = mod.clone()
        mod.update(tvm.IRModule(scheduled))
        return mod


def cpu_functions() -> list:
    """The passes of `fused_functions` for LLVM."""
    prepared = relax.backend.DispatchSampling(), WidenScans(), relax.backend.DispatchSortScan()
    legalizations = {**LEGALIZATIONS, **HALF_LEGALIZATIONS, **LONG_SUMS, **CPU_GROUPED_PRODUCTS}
    return fused_functions(prepared, legalizations, inspections=[NoteSegmentFunctions()])


def cpu_passes(target, tuned: TunedChoices | None = None) -> list:
    """The passes from Relax operators to scheduled PrimFuncs; a tuning log's schedules go before the rules."""
    known = [] if tuned is None else [ApplyTuningRecords(tuned, finish)]
    return [*cpu_functions(), *known, PackWeights(target), ScheduleForCPU(target), DescribeSchedules(), *REPAIRS]


def _schedule(func, simd):
    """The function as it is built, and what scheduled it."""
    for rule in () if _is_empty(func) else RULES:
        try:
            schedule = rule(func, simd)
        except blk.REFUSALS:
            continue
        if schedule is not None:
            return finish(expand_lanes(schedule.mod["main"])), rule_name(rule)
    return finish(func), PLAIN_LOOPS


def _is_empty(func) -> bool:
    """Whether an operand has no elements: the rules cannot split a loop of length 0."""
    return any(
        isinstance(size, tirx.IntImm) and int(size) == 0 for x in func.params for size in getattr(x.ty, "shape", ())
    )


def finish(func):
    """A scheduled function as it is built: with vector math, and bfloat16 computed in float32."""
    return expand_math(bind_repeated_calls(widen_bf16(func)))
