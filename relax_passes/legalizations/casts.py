"""Casts of constants: as the processor casts, whatever the value.

TVM's legalization goes through Python's numbers, which refuse to become integers where they are infinite, NaN or too
large.  PyTorch takes what a cast in C gives: the low bits of an integer, the smallest integer for what no integer is.
"""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst


def astype(builder, call):
    """The constant in the other dtype; TVM's own legalization for what is none."""
    operand, dtype = call.args[0], str(call.attrs.dtype)
    if not isinstance(operand, GenericConst) or len(operand.value.shape):
        return _TVM(builder, call)
    with np.errstate(invalid="ignore", over="ignore"):
        return relax.const(operand.value.numpy().astype(dtype), dtype)


_TVM = tvm.ir.Op.get("relax.astype").get_attr("FLegalize")
CASTS = {"relax.astype": astype}
