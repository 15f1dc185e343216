"""What TVM's lowering takes for something else, written so that it does not: the last passes, after schedules."""

from relax_passes.schedule.exact_floats import ExactFloats
from relax_passes.schedule.shifted_quotients import ShiftedQuotients

REPAIRS = (ExactFloats(), ShiftedQuotients())
