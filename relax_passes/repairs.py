"""What TVM's lowering takes for something else, written so that it does not: after schedules, the last before it."""

from relax_passes.exact_floats import ExactFloats
from relax_passes.shifted_quotients import ShiftedQuotients

REPAIRS = (ExactFloats(), ShiftedQuotients())
