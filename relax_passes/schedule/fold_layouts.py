"""FoldLayouts: constants with their axes in another order, with other shapes, or cut to some elements, by NumPy.

A model's weights are stored (out, in), and its products read them (in, out): nearly all that TVM's `FoldConstant` finds
is a transpose, and a program by LLVM for each was a quarter of a small model's build.  Layers of which some rows are
computed read these rows of tables.  Operators of any other meaning are left to `FoldConstant`, which comes later.

Preconditions: before `LegalizeOps`; bindings are flat, and each stands behind those that it reads.
"""

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import SAME_ELEMENTS, operator, permutation, static_shape
from relax_passes.ir.constant_arrays import SHARED, array_of
from relax_passes.ir.strided_views import slice_bounds

LAYOUTS = (*SAME_ELEMENTS, "permute_dims", "strided_slice")
WHOLE_BYTES = (*SHARED, "bfloat16", "bool")  # dtypes of which NumPy has an element for each element


@tvm.transform.module_pass(opt_level=0, name="FoldLayouts")
class FoldLayouts:
    """Replace transposes, reshapes and slices of constants, and of what these give, by constants."""

    def transform_module(self, mod, _ctx):
        changed = {}
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and (folded := _folded(func)):
                new = tvm_ffi.structural_map(func, (relax.Call, lambda call: folded.get(call, call)), order="post")
                changed[name] = new
        if changed:
            mod = mod.clone()
            mod.update(tvm.IRModule(changed))
        return mod


def _folded(func: relax.Function) -> dict[relax.Call, GenericConst]:
    """The constant that each call of a function gives that only lays out a constant anew."""
    constants, folded = {}, {}
    for block in getattr(func.body, "blocks", ()):
        for binding in block.bindings:
            value = getattr(binding, "value", None)
            if isinstance(value, relax.Call) and operator(value) in LAYOUTS:
                operand = value.args[0]
                constant = _laid_out(value, constants.get(operand, operand))
                if constant is not None:
                    constants[binding.var] = folded[value] = constant
    return folded


def _laid_out(call: relax.Call, constant) -> GenericConst | None:
    shape = static_shape(call)
    if not isinstance(constant, GenericConst) or str(constant.ty.dtype) not in WHOLE_BYTES or shape is None:
        return None
    array = array_of(constant)
    if operator(call) == "permute_dims":
        array = array.transpose(permutation(call))
    elif operator(call) == "strided_slice":
        bounds = slice_bounds(call)
        if bounds is None:
            return None
        array = array[tuple(slice(*bounds.get(axis, (None,))) for axis in range(array.ndim))]
        if array.shape != shape:
            return None
    else:
        array = array.reshape(shape)
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(shape)))  # it keeps float64 and bool
