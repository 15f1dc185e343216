"""GELU of float16 and bfloat16 in float32, as PyTorch computes it.

TVM rounds erf and tanh to float16 on the way: 1 + erf(…) is then 0 for x of -3.3 and below, where GELU is still -0.001.
"""

import math

from tvm import te, tirx

HALF = ("float16", "bfloat16")


def _in_float32(curve):
    """The legalization of x/2 · (1 + curve(x)) in float32 for `HALF`; other dtypes as TVM does."""

    def legalize(builder, call):
        if str(call.args[0].ty.dtype) not in HALF:
            return call.op.get_attr("FLegalize")(builder, call)

        def gelu(x):
            def element(*index):
                wide = x(*index).astype("float32")
                return (wide * _const(0.5) * (_const(1.0) + curve(wide))).astype(x.dtype)

            return te.compute(x.shape, element, name="gelu")

        return builder.call_te(gelu, call.args[0], primfunc_name_hint="gelu")

    return legalize


def _erf(x):
    return tirx.erf(x * _const(math.sqrt(0.5)))


def _tanh(x):
    return tirx.tanh((x + x * x * x * _const(0.044715)) * _const(math.sqrt(2 / math.pi)))


def _const(value):
    return tirx.const(value, "float32")


GELU = {"relax.nn.gelu": _in_float32(_erf), "relax.nn.gelu_tanh": _in_float32(_tanh)}
