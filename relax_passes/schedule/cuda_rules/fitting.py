"""A schedule rule for CUDA: another rule, where what it keeps in shared memory fits.

dlight's rule for general reductions keeps every intermediate array of a CTA in shared memory, whatever its size: for a
grouped convolution that is the whole padded input, which no multiprocessor can hold.
"""

import tvm
from tvm import s_tir
from tvm.s_tir import dlight
from tvm.s_tir.analysis import calculate_allocated_bytes

STATIC_SHARED_BYTES = 48 << 10  # of all architectures; a kernel with more must ask for it as it is launched
# Up to the allocations: buffers are as large as the part of them that a CTA uses.
ALLOCATED = tvm.transform.Sequential(
    [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
)


class Fitting(dlight.ScheduleRule):
    """The rule's schedule; None where it has none or fails, and where a kernel cannot have its static shared memory."""

    def __init__(self, rule: dlight.ScheduleRule):
        self.rule = rule

    def apply(self, func, target, tunable):
        try:
            schedule = self.rule.apply(func, target, tunable)
        except (AttributeError, AssertionError):
            # A rule that takes an extent for a number which it has made an expression; one for products by a vector
            # that asserts that more than one product is added up.
            return None
        if schedule is None:
            return None
        (first, *_) = schedule if isinstance(schedule, list) else [schedule]
        return schedule if shared_bytes(first.mod["main"]) <= STATIC_SHARED_BYTES else None


def shared_bytes(func: tvm.tirx.PrimFunc) -> int:
    """Bytes of static shared memory of a scheduled function's kernels, all together."""
    ((_, bytes_of_scope),) = calculate_allocated_bytes(ALLOCATED(tvm.IRModule({"main": func}))).items()
    return int(bytes_of_scope.get("shared", 0))
