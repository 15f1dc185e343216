"""From Relax operators to scheduled CUDA PrimFuncs by TVM's default rules, for all without a kernel of this project."""

import tvm
from tvm import relax
from tvm.s_tir import dlight

from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.schedule.apply_tuning_records import ApplyTuningRecords
from relax_passes.schedule.cuda_rules.elementwise import Elementwise
from relax_passes.schedule.cuda_rules.fitting import Fitting
from relax_passes.schedule.cuda_rules.reduce_rows import ReduceRows
from relax_passes.schedule.cuda_rules.scatter_slices import ScatterSlices
from relax_passes.schedule.cuda_rules.short_rows import ShortRows
from relax_passes.schedule.fused_functions import fused_functions
from relax_passes.schedule.repairs import REPAIRS
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.device import architecture_number


@tvm.transform.module_pass(opt_level=0, name="ScheduleForCUDA")
class ScheduleForCUDA:
    """Give every unscheduled PrimFunc a schedule, by the rules of dlight and of `cuda_rules`.

    dlight reads "sm_90a" as an architecture without tensor cores, so it is told the family, "sm_90".
    """

    def __init__(self, target):
        config = dict(target.export())
        config["arch"] = f"sm_{architecture_number(str(config['arch']))}"
        self.target = tvm.target.Target(config)

    def transform_module(self, mod, _ctx):
        gpu = dlight.gpu
        of_tvm = gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction()
        rules = (
            ScatterSlices(),
            Fitting(ShortRows()),
            *map(Fitting, of_tvm),
            ReduceRows(),
            Elementwise(),
            gpu.Fallback(),
        )
        with self.target, quick_script():  # the rules import 248 TVMScript functions
            return dlight.ApplyDefaultSchedule(*rules)(mod)


def cuda_functions() -> list:
    """The passes of `fused_functions` for CUDA."""
    prepared = relax.backend.DispatchSampling(), relax.backend.DispatchSortScan()
    return fused_functions(prepared, LEGALIZATIONS)


def cuda_passes(target, tuned: TunedChoices | None = None) -> list:
    """The passes from Relax operators to scheduled PrimFuncs; a tuning log's schedules go before the rules."""
    known = [] if tuned is None else [ApplyTuningRecords(tuned)]
    return [*cuda_functions(), *known, ScheduleForCUDA(target), *REPAIRS]
