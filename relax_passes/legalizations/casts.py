"""Casts of constants, done as the processor does them, whatever the value.

TVM's legalization goes through Python's numbers, and a number that is infinite, NaN or too large cannot become an
integer there.  PyTorch takes the result of a cast in C: the low bits of an integer, and the smallest integer for a
float that no integer can hold.
"""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst


def astype(builder, call):
    """The constant number in the other dtype; TVM's own legalization for any other operand."""
    operand, dtype = call.args[0], str(call.attrs.dtype)
    if not isinstance(operand, GenericConst) or len(operand.value.shape):
        return _TVM(builder, call)
    with np.errstate(invalid="ignore", over="ignore"):
        return relax.const(operand.value.numpy().astype(dtype), dtype)


_TVM = tvm.ir.Op.get("relax.astype").get_attr("FLegalize")
CASTS = {"relax.astype": astype}
