"""FoldLayouts: constants with their axes in another order, with other shapes, repeated, or cut to some elements.

A model's weights are stored (out, in), and its products read them (in, out): nearly all that TVM's `FoldConstant` finds
is a transpose, and a program by LLVM for each was a quarter of a small model's build.  Layers of which some rows are
computed read these rows of tables.  A tensor that a model fills part by part begins as a number that is repeated: in a
video model the programs that did this were a quarter of the build, too.  Operators of any other meaning are left to
`FoldConstant`, which comes later.

NumPy only describes each layout, as another view of a constant's memory.  Elements are copied for the layouts that
something else reads, once for all readers of one view.

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

LAYOUTS = (*SAME_ELEMENTS, "permute_dims", "strided_slice", "broadcast_to")
WHOLE_BYTES = (*SHARED, "bfloat16", "bool")  # dtypes of which NumPy has an element for each element
SMALL = 64  # bytes of a constant that equal ones stand for


@tvm.transform.module_pass(opt_level=0, name="FoldLayouts")
class FoldLayouts:
    """Replace transposes, reshapes, repetitions and slices of constants, and of what these give, by constants."""

    def transform_module(self, mod, _ctx):
        changed = {}
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and (folded := _Layouts(func).folded()):
                new = tvm_ffi.structural_map(func, (relax.Call, lambda call: folded.get(call, call)), order="post")
                changed[name] = relax.analysis.remove_all_unused(new)  # layouts that only layouts read
        if changed:
            mod = mod.clone()
            mod.update(tvm.IRModule(changed))
        return mod


class _Layouts:
    """The layouts of constants in a function."""

    def __init__(self, func: relax.Function):
        self.views: dict[relax.Var, np.ndarray] = {}  # variable of a layout -> its elements, not yet copied
        self.calls: dict[relax.Var, relax.Call] = {}
        result = getattr(func.body, "body", func.body)
        self.read = set(relax.analysis.free_vars(result))  # variables that something else than a layout reads
        self.small: dict[tuple, np.ndarray] = {}  # the elements of small constants, the same for equal ones
        for block in getattr(func.body, "blocks", ()):
            for binding in block.bindings:
                value = getattr(binding, "value", None)
                view = self._view(value) if isinstance(value, relax.Call) else None
                if view is None:
                    self.read.update(relax.analysis.free_vars(value))
                else:
                    self.views[binding.var], self.calls[binding.var] = view, value

    def folded(self) -> dict[relax.Call, GenericConst]:
        """The constant that each layout gives that something else reads."""
        constants: dict[tuple, GenericConst] = {}  # what a view is -> the constant of its elements
        found = {}
        for var in self.views:
            if var in self.read:
                view = self.views[var]
                key = view.ctypes.data, view.shape, view.strides, view.dtype.name
                if key not in constants:
                    constants[key] = _constant(view)
                found[self.calls[var]] = constants[key]
        return found

    def _view(self, call: relax.Call) -> np.ndarray | None:
        """The elements of a layout; None if the call is no layout of a constant that can be folded here."""
        shape = static_shape(call)
        if operator(call) not in LAYOUTS or shape is None:
            return None
        array = self._elements(call.args[0])
        return None if array is None else _laid_out(call, array, shape)

    def _elements(self, operand) -> np.ndarray | None:
        if not isinstance(operand, GenericConst):
            return self.views.get(operand)
        if str(operand.ty.dtype) not in WHOLE_BYTES:
            return None
        array = array_of(operand)
        if array.nbytes > SMALL:
            return array
        return self.small.setdefault((array.dtype.name, array.shape, array.tobytes()), array)


def _laid_out(call: relax.Call, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    if operator(call) == "permute_dims":
        return array.transpose(permutation(call))
    if operator(call) == "broadcast_to":
        return np.broadcast_to(array, shape)
    if operator(call) == "strided_slice":
        bounds = slice_bounds(call)
        if bounds is None:
            return None
        array = array[tuple(slice(*bounds.get(axis, (None,))) for axis in range(array.ndim))]
        return array if array.shape == shape else None
    return array.reshape(shape)


def _constant(array: np.ndarray) -> GenericConst:
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape)))  # keeps float64 and bool
