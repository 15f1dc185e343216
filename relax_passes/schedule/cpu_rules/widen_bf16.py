"""bf16 values in stores: converted and rounded by operations on bits, and computed in fp32.

TVM has passes for this, with three faults.  They drop a cast to bfloat16 and back, and with it the rounding that the
model asks for.  They overlook conversions below a bound variable, which the expansion of exp, tanh, … introduces.  They
repeat the expression that they round, with all its variables, and the vectoriser then refuses it.
"""

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, Var

ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
STEPS = ("tirx.floor", "tirx.ceil", "tirx.round", "tirx.nearbyint", "tirx.trunc", "tirx.fmod")
COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


def widen_bf16(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that computes stored bf16 values, and values computed from bf16, in fp32.

    Its own bf16 buffers become fp32, too.  A cast to bfloat16 that the model writes rounds.  Operands whose rounding
    may decide the result are rounded, too: those of comparisons, of casts to other dtypes, of floor and the like.
    Nothing is rounded between other operators of one function.
    """
    buffers = {}

    def widen_own(block):
        for buffer in block.alloc_buffers:
            if str(buffer.ty.dtype) == "bfloat16":
                buffers[buffer] = tirx.decl_buffer(buffer.ty.shape, "float32", buffer.name, scope=buffer.scope())

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, widen_own), order="pre")
    body = tvm_ffi.structural_map(
        func.body, (tirx.BufferStore, lambda store: _widen_store(store, buffers)), order="post"
    )
    if buffers:
        body = tvm_ffi.structural_map(body, (Var, lambda var: buffers.get(var, var)), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _widen_store(store, buffers):
    """The store with its value in fp32; `buffers` maps the function's own bf16 buffers to fp32 ones."""
    if not _has_bf16(store.value):
        return store
    store = tirx.BufferStore(store.buffer, _with_roundings(store.value), store.indices)
    if not _is_bf16(store.value):
        return tirx.BufferStore(store.buffer, _widen(store.value, buffers), store.indices)
    if store.buffer in buffers:
        return tirx.BufferStore(buffers[store.buffer], _widen(store.value, buffers), store.indices)
    if isinstance(store.value, TensorLoad) and store.value.source not in buffers:
        bits = tirx.Var("bits", "uint16")
        copied = tirx.BufferStore(store.buffer, tirx.reinterpret("bfloat16", bits), store.indices)
        return tirx.SeqStmt([tirx.Bind(bits, tirx.reinterpret("uint16", store.value)), copied])
    unrounded = store.value.value if isinstance(store.value, tirx.Cast) else store.value
    bound = tirx.Var("value", "float32")
    bits = tirx.reinterpret("bfloat16", _rounded_bits(bound))
    value = _widen(unrounded, buffers).astype("float32")
    return tirx.SeqStmt([tirx.Bind(bound, value), tirx.BufferStore(store.buffer, bits, store.indices)])


def _with_roundings(expr):
    """The expression with a cast to bfloat16 around each computed operand whose rounding may decide the result."""
    callbacks = [
        (COMPARISONS, lambda node: type(node)(_rounded(node.a), _rounded(node.b))),
        (tirx.Cast, lambda node: node if _is_bf16(node) else tirx.Cast(node.ty, _rounded(node.value))),
        (Call, _with_rounded_arguments),
    ]
    return tvm_ffi.structural_map(expr, callbacks, order="post")


def _with_rounded_arguments(call):
    if getattr(call.op, "name", "") not in STEPS:
        return call
    return Call(call.op, [_rounded(x) for x in call.args], call.attrs, ret_ty=call.ty)


def _rounded(expr):
    """A bf16 expression that is computed, rounded to bf16; any other expression unchanged."""
    is_computed = isinstance(expr, (*ARITHMETIC, tirx.Select, tirx.Let, TensorLoad, Call)) and _is_bf16(expr)
    return tirx.Cast(expr.ty, tirx.Cast(tirx.const(0, "float32").ty, expr)) if is_computed else expr


def _has_bf16(expr) -> bool:
    """Whether any part of an expression is bf16."""
    found = []
    kinds = (*ARITHMETIC, tirx.Select, tirx.Let, tirx.Cast, tirx.FloatImm, TensorLoad, Call)
    tvm_ffi.structural_walk(expr, (kinds, lambda node: found.append(_is_bf16(node))), order="post")
    return any(found)


def _widen(expr, buffers):
    """The expression in fp32 wherever it was in bf16."""
    callbacks = [
        (ARITHMETIC + COMPARISONS, lambda node: type(node)(node.a, node.b)),
        (tirx.Select, lambda node: tirx.Select(node.condition, node.true_value, node.false_value)),
        (tirx.Cast, _widen_cast),
        (tirx.FloatImm, lambda node: tirx.const(node.value, "float32") if _is_bf16(node) else node),
        (TensorLoad, lambda node: _widen_load(node, buffers)),
        (Call, _widen_call),
    ]
    return tvm_ffi.structural_map(expr, callbacks, order="post")


def _widen_cast(cast):
    """A cast with its operand in fp32; one to bfloat16 rounds and stays in fp32."""
    if not _is_bf16(cast):
        return cast.value.astype(str(cast.ty.dtype))
    bound = tirx.Var("wide", "float32")
    narrow = _rounded_bits(bound).astype("uint32") << 16
    return tirx.Let(bound, cast.value.astype("float32"), tirx.reinterpret("float32", narrow))


def _widen_call(call):
    return Call(call.op, call.args, call.attrs, ret_ty=tirx.const(0, "float32").ty) if _is_bf16(call) else call


def _widen_load(load, buffers):
    if load.source in buffers:
        return buffers[load.source][tuple(load.indices)]
    if not _is_bf16(load):
        return load
    bits = tirx.reinterpret("uint16", load).astype("uint32") << 16
    return tirx.reinterpret("float32", bits)


def _rounded_bits(value):
    """The uint16 of an fp32 variable's bfloat16: to the nearest, ties to even."""
    bits = tirx.reinterpret("uint32", value)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


def _is_bf16(expr) -> bool:
    return str(getattr(expr.ty, "dtype", "")) == "bfloat16"
