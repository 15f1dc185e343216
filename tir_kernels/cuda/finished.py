"""What every CUDA kernel's PrimFunc gets last: its absent arguments are left out, and passes are told to leave it."""

from collections.abc import Iterable

import tvm

from tir_kernels.cuda.dependent_launch import FILLS_MULTIPROCESSORS

OPAQUE = 8  # of relax.transform.AnnotateTIROpPattern: fusion leaves it as it is


def finished(kernel, symbol: str, absent: Iterable[str], fills: bool = False) -> tvm.tirx.PrimFunc:
    """The PrimFunc of a kernel in TIRx without the `absent` of its optional arguments, under a global symbol.

    `fills`: its CTAs fill the shared memory of multiprocessors, so nothing is launched beside them before they end.
    """
    attributes = {"global_symbol": symbol, "tirx.noalias": True, "op_pattern": OPAQUE, "tirx.is_scheduled": True}
    if fills:
        attributes[FILLS_MULTIPROCESSORS] = True
    return kernel.specialize(**dict.fromkeys(absent)).with_attrs(attributes)
