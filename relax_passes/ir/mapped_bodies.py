"""Expressions rewritten in the bodies of all schedulable functions of a module."""

import tvm
import tvm_ffi
from tvm import tirx


def with_mapped_bodies(mod: tvm.IRModule, callbacks: list) -> tvm.IRModule:
    """The module with `callbacks`, pairs of a node type and what makes a new node of one, applied to each body.

    Operands come before what they are in.  Functions of which nothing changes, and the module then, stay the same.
    """
    changed = {}
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and func.attrs.get("s_tir", False):
            body = tvm_ffi.structural_map(func.body, callbacks, order="post")
            if not body.same_as(func.body):
                changed[name] = func.with_body(body)
    if changed:
        mod = mod.clone()
        mod.update(tvm.IRModule(changed))
    return mod
