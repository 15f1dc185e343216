"""FoldTransposes: transposes of constants by NumPy, before `FoldConstant`, which compiles a program for each.

A model's weights are stored (out, in), and its products read them (in, out): nearly all that `FoldConstant` finds is a
transpose, and a program by LLVM for each was a quarter of a small model's build.  What this pass leaves, `FoldConstant`
folds as before, to the same bits.

Preconditions: after `LegalizeOps`, before `FuseOps`.
"""

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import TensorLoad
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import operator
from relax_passes.ir.constant_arrays import SHARED, array_of

WHOLE_BYTES = (*SHARED, "bfloat16", "bool")  # dtypes of which NumPy has an element for each element


@tvm.transform.module_pass(opt_level=0, name="FoldTransposes")
class FoldTransposes:
    """Replace each call of a function that permutes the axes of one constant by the permuted constant."""

    def transform_module(self, mod, _ctx):
        axes = {name: axes_of(func) for name, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}

        def fold(call):
            order = axes.get(call.args[0]) if operator(call) == "call_tir" and len(call.args) == 2 else None
            if order is None or not isinstance(call.args[1], relax.Tuple) or len(call.args[1].fields) != 1:
                return call
            (constant,) = call.args[1].fields
            if not isinstance(constant, GenericConst) or str(constant.ty.dtype) not in WHOLE_BYTES:
                return call
            permuted = np.ascontiguousarray(array_of(constant).transpose(order))
            return relax.const(tvm.runtime.tensor(permuted))  # of an array it would make float32 out of float64

        changed = {}
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                new = tvm_ffi.structural_map(func, (relax.Call, fold), order="post")
                if not new.same_as(func):
                    changed[name] = new
        if changed:
            mod = mod.clone()
            mod.update(tvm.IRModule(changed))
        return mod


def axes_of(func: tirx.PrimFunc) -> list[int] | None:
    """The axis of the operand that each axis of the result is, if all that a function does is to permute them."""
    if len(func.params) != 2 or not isinstance(func.body, s_tir.SBlockRealize):
        return None
    found: list = []
    tvm_ffi.structural_walk(func.body.block.body, (s_tir.SBlockRealize, found.append), order="post")
    if len(found) != 1 or not _is_one(found[0].predicate):
        return None
    block = found[0].block
    store, variables = block.body, [axis.var for axis in block.iter_vars]
    if block.init is not None or not isinstance(store, tirx.BufferStore) or not isinstance(store.value, TensorLoad):
        return None
    load = store.value
    if not load.source.same_as(func.params[0]) or not store.buffer.same_as(func.params[1]):
        return None
    if not _are(store.indices, variables) or not len(load.indices) == len(variables):
        return None
    if any(
        axis.iter_type != tirx.IterVar.DataPar or not _is_whole(axis.dom, size)
        for axis, size in zip(block.iter_vars, store.buffer.ty.shape)
    ):
        return None
    axes = [[i for i, index in enumerate(load.indices) if index.same_as(var)] for var in variables]
    return [i for (i,) in axes] if all(len(own) == 1 for own in axes) else None


def _are(indices, variables) -> bool:
    return len(indices) == len(variables) and all(index.same_as(var) for index, var in zip(indices, variables))


def _is_one(value) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == 1


def _is_whole(domain, size) -> bool:
    numbers = domain.min, domain.extent, size
    return all(isinstance(x, tirx.IntImm) for x in numbers) and [int(x) for x in numbers] == [0, int(size), int(size)]
