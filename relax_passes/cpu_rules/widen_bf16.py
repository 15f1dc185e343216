"""bf16 expressions that call exp, tanh, … computed in fp32 and rounded once, at the store.

TVM does this too, after this project's passes, but not below a conversion, and its rounding repeats the expression, with
every variable that the expansion of such a call binds, which TVM's vectoriser then refuses.
"""

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from relax_passes.cpu_rules.blocks import DEAR_CALLS, calls_in

ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def widen_bf16(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with every store of such an expression widened."""
    body = tvm_ffi.structural_map(func.body, (tirx.BufferStore, _widen_store), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _widen_store(store):
    if not any(_is_bf16(call) for call in calls_in(store.value, DEAR_CALLS)):
        return store
    value = widen(store.value)
    if not _is_bf16(store.value):
        return tirx.BufferStore(store.buffer, value, store.indices)
    bound = tirx.Var("value", "float32")
    rounded = tirx.BufferStore(store.buffer, bound.astype("bfloat16"), store.indices)
    return tirx.SeqStmt([tirx.Bind(bound, value), rounded])


def widen(expr):
    """The expression in fp32 wherever it was in bf16."""
    callbacks = [
        (ARITHMETIC + COMPARISONS, lambda node: type(node)(node.a, node.b)),
        (tirx.Select, lambda node: tirx.Select(node.condition, node.true_value, node.false_value)),
        (tirx.Cast, lambda node: node.value.astype("float32" if _is_bf16(node) else str(node.ty.dtype))),
        (tirx.FloatImm, lambda node: tirx.const(node.value, "float32") if _is_bf16(node) else node),
        (TensorLoad, lambda node: node.astype("float32") if _is_bf16(node) else node),
        (Call, _widen_call),
    ]
    return tvm_ffi.structural_map(expr, callbacks, order="post")


def _widen_call(call):
    if not _is_bf16(call):
        return call
    return Call(call.op, call.args, call.attrs, ret_ty=tirx.const(0, "float32").ty)


def _is_bf16(expr) -> bool:
    return str(getattr(expr.ty, "dtype", "")) == "bfloat16"
