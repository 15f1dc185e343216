"""Apply tuning records: PrimFuncs get the schedules that MetaSchedule found for them.

Preconditions: after `FuseTIR`, before the default schedules, which leave functions with `tirx.is_scheduled` alone.
"""

import tvm
from tvm import tirx

from relax_passes.schedule.segment_schedules import SCHEDULE, TUNED
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.compiling.quick_script import quick_script


@tvm.transform.module_pass(opt_level=0, name="ApplyTuningRecords")
class ApplyTuningRecords:
    """Schedule every unscheduled TensorIR function that a tuning log knows.

    Parameters
    ----------
    tuned : TunedChoices
        The records of the log.
    finish : callable
        Maps a scheduled PrimFunc to the PrimFunc that is built.
    """

    def __init__(self, tuned: TunedChoices, finish=lambda function: function):
        self.tuned = tuned
        self.finish = finish

    def transform_module(self, mod, _ctx):
        scheduled = {}
        for name, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and is_unscheduled(function):
                found = self._schedule(function)
                if found is not None:
                    scheduled[name] = found
        mod = mod.clone()
        mod.update(tvm.IRModule(scheduled))
        return mod

    def _schedule(self, function):
        with quick_script():  # traces may name tensor intrinsics
            scheduled = self.tuned.schedule(function)
        if scheduled is None:
            return None
        return self.finish(scheduled.without_attr("global_symbol")).with_attrs(
            {"tirx.is_scheduled": True, SCHEDULE: TUNED}
        )


def is_unscheduled(function: tirx.PrimFunc) -> bool:
    """Whether a function is schedulable TensorIR that has no schedule yet."""
    return bool(function.attrs.get("s_tir", False)) and not function.attrs.get("tirx.is_scheduled", False)
