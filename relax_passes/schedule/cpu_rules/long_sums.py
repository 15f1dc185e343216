"""Sums of many float32 numbers on a CPU, in float64.

A running sum loses one more digit each time that it has ten times as many numbers.  PyTorch adds in a tree, and scans
in double.  Short sums stay as they are: what they lose is within float32's rounding.
"""

import math

import tvm
from tvm import relax, te, topi
from tvm.ir import Op

from relax_passes.ir.bindings import operator, static_shape
from relax_passes.ir.open_blocks import closing_blocks

LONG = 1024  # numbers in a long sum


def legalize_reduction(name: str):
    """The legalization of a long sum or mean of float32 in float64; of any other as TVM does."""

    def legalize(builder, call):
        x, rank = call.args[0], len(call.args[0].ty.shape)
        axes = range(rank) if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]
        count = math.prod(int(x.ty.shape[axis]) for axis in axes)
        if str(x.ty.dtype) != "float32" or count < LONG:
            return Op.get(name).get_attr("FLegalize")(builder, call)

        def reduction(x):
            wide = te.compute(x.shape, lambda *index: x(*index).astype("float64"), name="wide")
            total = topi.sum(wide, axis=list(axes), keepdims=bool(call.attrs.keepdims))
            factor = 1.0 / count if name == "relax.mean" else 1.0
            return te.compute(total.shape, lambda *index: (total(*index) * factor).astype("float32"), name="rounded")

        return builder.call_te(reduction, x, primfunc_name_hint=name.rsplit(".", 1)[1])

    return legalize


@tvm.transform.module_pass(opt_level=0, name="WidenScans")
class WidenScans:
    """Compute long cumulative sums and products of float32 in float64; before `DispatchSortScan`, which lowers them."""

    def transform_module(self, mod, _ctx):
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                widener = _Widener(mod)
                with closing_blocks(widener.builder_):
                    mod.update_func(name, widener.visit_expr(function))
        return mod


@relax.expr_functor.mutator
class _Widener(relax.PyExprMutator):
    def visit_call_(self, call):
        call = super().visit_call_(call)
        if operator(call) not in SCANS or str(call.ty.dtype) != "float32":
            return call
        shape, axis = static_shape(call.args[0]), call.attrs.axis
        if shape is None or (math.prod(shape) if axis is None else shape[int(axis)]) < LONG:
            return call
        wide = SCANS[operator(call)](
            call.args[0], None if axis is None else int(axis), "float64", bool(call.attrs.exclusive)
        )
        return relax.op.astype(self.builder_.emit(wide), "float32")


SCANS = {"cumsum": relax.op.cumsum, "cumprod": relax.op.cumprod}
LONG_SUMS = {name: legalize_reduction(name) for name in ("relax.sum", "relax.mean")}
