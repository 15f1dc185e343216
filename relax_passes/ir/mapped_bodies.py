"""Rewriting of expressions in the bodies of all schedulable functions of a module."""

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx


def with_mapped_bodies(mod: tvm.IRModule, callbacks: list | Callable[[tirx.PrimFunc], list]) -> tvm.IRModule:
    """The module with `callbacks`, pairs (node type, function from a node to the new node), applied to each body.

    They may be given as a function from the function whose body it is, which gives none where nothing is to be done.
    Operands are rewritten before the expressions that contain them.  A function in which nothing changes stays the same
    object, and so does a module in which no function changes.
    """
    changed = {}
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and func.attrs.get("s_tir", False):
            own = callbacks(func) if callable(callbacks) else callbacks
            body = tvm_ffi.structural_map(func.body, own, order="post") if own else func.body
            if not body.same_as(func.body):
                changed[name] = func.with_body(body)
    if changed:
        mod = mod.clone()
        mod.update(tvm.IRModule(changed))
    return mod
