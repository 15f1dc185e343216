"""The last step for every CUDA kernel: parse it without absent arguments, and set attributes that keep passes off."""

from collections.abc import Iterable

import tvm

from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.dependent_launch import FILLS_MULTIPROCESSORS, WAITS_ITSELF

OPAQUE = 8  # a pattern of relax.transform.AnnotateTIROpPattern: fusion leaves the function as it is


def finished(kernel, symbol: str, absent: Iterable[str], fills: bool = False, waits: bool = False) -> tvm.tirx.PrimFunc:
    """The PrimFunc of a kernel in TIRx, without its optional arguments in `absent`, under a global symbol.

    `fills` says that the kernel's CTAs fill the shared memory of multiprocessors.  Then no kernel is launched before
    they end, or allow it themselves.  `waits` says that the kernel itself waits for the one before, ahead of its first
    access to global memory.
    """
    assert fills or not waits  # others allow the next launch at their beginning, which must not be before the wait
    attributes = {"global_symbol": symbol, "tirx.noalias": True, "op_pattern": OPAQUE, "tirx.is_scheduled": True}
    if fills:
        attributes[FILLS_MULTIPROCESSORS] = True
    if waits:
        attributes[WAITS_ITSELF] = True
    with quick_script():
        return kernel.specialize(**dict.fromkeys(absent)).with_attrs(attributes)
