"""bf16 in stores that call exp, tanh, …: read and rounded bit by bit, computed in fp32 between.

TVM has passes for this, but they overlook conversions below a bound variable, which the expansion of such a call
brings, and repeat the expression that they round, with all its variables, which the vectoriser then refuses.
"""

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from relax_passes.cpu_rules.blocks import calls_in
from relax_passes.cpu_rules.vector_math import EXPANDED_CALLS

ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def widen_bf16(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with every such store computed in fp32."""
    body = tvm_ffi.structural_map(func.body, (tirx.BufferStore, _widen_store), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _widen_store(store):
    if not calls_in(store.value, EXPANDED_CALLS):
        return store
    value = _widen(store.value)
    if not _is_bf16(store.value):
        return tirx.BufferStore(store.buffer, value, store.indices)
    bound = tirx.Var("value", "float32")
    return tirx.SeqStmt([tirx.Bind(bound, value), tirx.BufferStore(store.buffer, _from_fp32(bound), store.indices)])


def _widen(expr):
    """The expression in fp32 wherever it was in bf16."""
    callbacks = [
        (ARITHMETIC + COMPARISONS, lambda node: type(node)(node.a, node.b)),
        (tirx.Select, lambda node: tirx.Select(node.condition, node.true_value, node.false_value)),
        (tirx.Cast, lambda node: node.value.astype("float32" if _is_bf16(node) else str(node.ty.dtype))),
        (tirx.FloatImm, lambda node: tirx.const(node.value, "float32") if _is_bf16(node) else node),
        (TensorLoad, lambda node: _to_fp32(node) if _is_bf16(node) else node),
        (Call, _widen_call),
    ]
    return tvm_ffi.structural_map(expr, callbacks, order="post")


def _widen_call(call):
    return Call(call.op, call.args, call.attrs, ret_ty=tirx.const(0, "float32").ty) if _is_bf16(call) else call


def _to_fp32(load):
    bits = tirx.reinterpret("uint16", load).astype("uint32") << 16
    return tirx.reinterpret("float32", bits)


def _from_fp32(value):
    """To the nearest, ties to even."""
    bits = tirx.reinterpret("uint32", value)
    return tirx.reinterpret("bfloat16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16"))


def _is_bf16(expr) -> bool:
    return str(getattr(expr.ty, "dtype", "")) == "bfloat16"
