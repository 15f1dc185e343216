"""Calls of vector math that an expression makes more than once are made once: inlining copies an operand to each use.

`remainder` reads its operand six times.  If the operand is sinh(x), the expression would contain the arithmetic of sinh
six times: TVM's simplifier would take minutes, and each copy would be computed.
"""

from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad, Var

from relax_passes.schedule.cpu_rules.vector_math import EXPANDED_CALLS

FLOATS = ("float32", "float16")


@dataclass
class _Repeated:
    """A call, in which inner calls are variables, the variable that stands for it, and how often it is made."""

    call: Call
    variable: Var
    count: int = 0


def bind_repeated_calls(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with each call that a stored value makes more than once bound to a variable.

    A call in a branch of an if_then_else is bound in that branch, which may guard it.  A Select guards nothing: both
    sides can always be computed, because reads that may lie outside a tensor are in an if_then_else.

    Preconditions: before `expand_math`, after `widen_bf16`.  Values that already bind variables stay as they are.  So
    do values that read bfloat16: TVM overlooks a conversion from bfloat16 within a binding.
    """
    body = tvm_ffi.structural_map(func.body, (tirx.BufferStore, _bound), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _bound(store):
    value = _once(store.value) if _is_open(store.value) else store.value
    return store if value.same_as(store.value) else tirx.BufferStore(store.buffer, value, store.indices)


def _once(value):
    """The value with its repeated calls bound, those in a branch within the branch."""
    found: dict[tvm_ffi.StructuralKey, _Repeated] = {}
    shut = lambda call: _numbered(found, call) if _has_branches(call) else call
    number = lambda call: _numbered(found, call) if _is_math(call) else call
    value = tvm_ffi.structural_map(value, (Call, shut), order="pre")
    value = tvm_ffi.structural_map(value, (Call, number), order="post")
    for one in reversed(found.values()):  # inner calls were found first
        call = one.call
        if _has_branches(call):
            condition, *branches = call.args
            call = tirx.if_then_else(condition, *map(_once, branches))
        if one.count > 1:
            value = tirx.Let(one.variable, call, value)
        else:
            put = lambda x, variable=one.variable, call=call: call if x.same_as(variable) else x
            value = tvm_ffi.structural_map(value, (Var, put), order="post")
    return value


def _numbered(found: dict, call) -> Var:
    """The variable that stands for a call, and for those that are equal to it."""
    key = tvm_ffi.StructuralKey(call)  # type: ignore[call-arg]  # its stub has its fields
    if key not in found:
        found[key] = _Repeated(call, Var("called", str(call.ty.dtype)))
    found[key].count += 1
    return found[key].variable


def _is_open(value) -> bool:
    """Whether the value makes several calls, and neither binds variables nor reads bfloat16."""
    calls, lets, halves = [], [], []
    see = lambda call: calls.append(call) if _is_math(call) else None
    load = lambda x: halves.append(x) if str(x.ty.dtype).startswith("bfloat16") else None
    tvm_ffi.structural_walk(value, [(Call, see), (tirx.Let, lets.append), (TensorLoad, load)], order="post")
    return len(calls) > 1 and not lets and not halves


def _is_math(call) -> bool:
    is_float = str(getattr(call.ty, "dtype", "")) in FLOATS
    return is_float and getattr(call.op, "name", "") in EXPANDED_CALLS


def _has_branches(call) -> bool:
    return getattr(call.op, "name", "") == "prim.if_then_else"
