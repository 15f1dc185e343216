"""The last passes, after schedules: they rewrite expressions that TVM's lowering would get wrong."""

from relax_passes.schedule.exact_floats import ExactFloats
from relax_passes.schedule.shifted_quotients import ShiftedQuotients

REPAIRS = (ExactFloats(), ShiftedQuotients())
