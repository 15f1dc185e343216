"""Attention by PyTorch: what is traced into a graph, what is trained, and what no kernel supports."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from stof_tvm.transformers.attention import Call


def dense_attention(call: "Call", dropout: float, kwargs: dict[str, Any]) -> torch.Tensor:
    """The result (B, Sq, H, Dv) of a call whose mask is a plain tensor: boolean, or scores that are added.

    transformers' "sdpa" computes it, but for softcaps, which that refuses, and sinks, which it leaves out.
    """
    if call.softcap is None and call.sink is None:
        out, _ = sdpa_attention_forward(
            call.module,
            call.query,
            call.key,
            call.value,
            call.mask,
            dropout=dropout,
            scaling=call.scaling,
            is_causal=call.is_causal,
            position_bias=call.bias,
            **kwargs,
        )
        return out
    return _written_out(call, dropout)


def _written_out(call: "Call", dropout: float) -> torch.Tensor:
    """The same by products and a softmax, in a form that `stof_tvm.build` recognises."""
    query, shared = call.query, call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (call.key, call.value))
    scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.bias is not None:
        scores = scores + call.bias
    mask = call.mask
    if call.is_causal_by_itself:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if call.sink is not None:
        sink = call.sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if call.sink is not None:
        weights = weights[..., :-1]
    if dropout > 0:
        weights = torch.dropout(weights, dropout, train=True)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
