"""Floats multiplied or divided by the constant 0, and 0 divided by floats: NaN and infinities where PyTorch has them.

TVM folds `0 * x` and `0 / x` to 0 when the expression is made, of any dtype, and refuses `x / 0`.
"""

import math

from tvm import te, tirx

from relax_passes.ir.floats import opaque
from relax_passes.legalizations.extrema import constant_number, keeps_nan


def _legalize(name: str, combine, zero_at: tuple[int, ...]):
    """A legalization of `combine(a, b)`; `zero_at` has the positions at which a constant 0 is special."""

    @keeps_nan
    def legalize(builder, call):
        numbers = [constant_number(operand) for operand in call.args]
        zeros = [i for i in zero_at if numbers[i] is not None and numbers[i].value == 0]
        if not zeros or (numbers[1 - zeros[-1]] is not None and name != "divide"):
            return call.op.get_attr("FLegalize")(builder, call)
        at = zeros[-1]  # for 0 / 0, the divisor
        other = call.args[1 - at]
        signed = math.copysign(0.0, float(numbers[at].value))
        zero = opaque(tirx.const(signed, "float32")).astype(str(other.ty.dtype))

        def compute(x):
            pair = (lambda element: (zero, element)) if at == 0 else (lambda element: (element, zero))
            return te.compute(x.shape, lambda *index: combine(*pair(x(*index))), name=name)

        return builder.call_te(compute, other, primfunc_name_hint=name)

    return legalize


ZEROS = {
    "relax.multiply": _legalize("multiply", tirx.Mul, (0, 1)),
    "relax.divide": _legalize("divide", tirx.Div, (0, 1)),
}
