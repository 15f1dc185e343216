"""PyTorch's scaled_dot_product_attention to the composite form of attention, whatever its ranks and broadcasts are."""

import math

from tvm import relax

from relax_passes.attention.composite import emit_attention
from tir_kernels.attention.problem import DTYPES
from tir_kernels.errors import UnsupportedError

op = relax.op


def scaled_dot_product_attention(
    context, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """q (…, H, Sq, D), k (…, Hkv, Skv, D), v (…, Hkv, Skv, Dv), mask or bias broadcast to (…, H, Sq, Skv).

    TVM 0.27 drops `scale` and `enable_gqa`, and refuses boolean masks and masks of fewer than four dimensions.
    """
    if dropout_p:
        raise UnsupportedError(
            f"attention with dropout_p={dropout_p}: call model.eval() before it is exported or compiled; a forward "
            "that calls scaled_dot_product_attention itself has to pass dropout_p=0 there"
        )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if str(x.ty.dtype) not in DTYPES:
            raise UnsupportedError(f"attention with a {name} of dtype {x.ty.dtype}; supported are {', '.join(DTYPES)}")
    if is_causal and scale is not None and scale <= 0:
        # PyTorch's CPU kernels multiply -inf by the scale and give NaN; its reference implementation gives numbers.
        raise UnsupportedError(f"causal attention with scale={scale}: PyTorch's own results of it differ by backend")
    operands = [q, k, v] if attn_mask is None else [q, k, v, attn_mask]
    q, k, v, *masks = _four_dimensional(context, operands)
    q, k, v = _match_heads(context, q, k, v, enable_gqa)
    boolean = attn_mask is not None and str(attn_mask.ty.dtype) == "bool"
    out = emit_attention(
        context.builder,
        q,
        k,
        v,
        mask=masks[0] if masks and boolean else None,
        bias=masks[0] if masks and not boolean else None,
        scale=scale,
        causal="top-left" if is_causal else "",
        site=context.site(),
        spelling="sdpa",
    )
    return _reshape(context, out, context.shape)


def _four_dimensional(context, operands):
    """The operands as (batch, heads, rows, columns), their batches equal, except a mask's, which may stay 1.

    A third dimension from the end is heads only where there is a fourth: (N, S, D) is N sequences of one head.
    """
    shapes = [_shape(x) for x in operands]
    rank = max(len(shape) for shape in shapes)
    leading = [[1] * (rank - len(shape)) + shape[:-2] for shape in shapes]
    if rank < 4:
        leading = [lead + [1] * (4 - rank) for lead in leading]
    batch = [max(sizes) for sizes in zip(*(lead[:-1] for lead in leading))]
    result = []
    for index, (x, lead, shape) in enumerate(zip(operands, leading, shapes)):
        is_mask = index == 3
        if lead[:-1] != batch and not (is_mask and math.prod(lead[:-1]) == 1):
            x = _reshape(context, x, lead + shape[-2:])
            lead = batch + lead[-1:]
            x = context.emit(op.broadcast_to(x, lead + shape[-2:]))
        result.append(_reshape(context, x, [math.prod(lead[:-1]), lead[-1], *shape[-2:]]))
    return result


def _match_heads(context, q, k, v, enable_gqa):
    """Repeat heads so that k and v have the same number, a divisor of q's: a group of q's heads shares one of each."""
    q_heads, k_heads, v_heads = (int(x.ty.shape[1]) for x in (q, k, v))
    if not enable_gqa and len({q_heads, k_heads, v_heads} - {1}) > 1:
        raise UnsupportedError(f"query, key, value have {q_heads}, {k_heads}, {v_heads} heads; needs enable_gqa=True")
    kv_heads = max(k_heads, v_heads)
    if q_heads < kv_heads:
        q = context.emit(op.repeat(q, kv_heads // q_heads, axis=1))
    if k_heads < kv_heads:
        k = context.emit(op.repeat(k, kv_heads // k_heads, axis=1))
    if v_heads < kv_heads:
        v = context.emit(op.repeat(v, kv_heads // v_heads, axis=1))
    return q, k, v


def _shape(x) -> list[int]:
    return [int(n) for n in x.ty.shape]


def _reshape(context, x, shape):
    return x if _shape(x) == list(shape) else context.emit(op.reshape(x, shape))


ATTENTION_CONVERTERS = {"scaled_dot_product_attention.default": scaled_dot_product_attention}
