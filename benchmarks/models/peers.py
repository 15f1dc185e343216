"""The model on PyTorch with the mask: eager, or compiled, by scaled_dot_product_attention or by FlexAttention.

Attention is registered with transformers under names of its own, for which transformers makes no masks: the one mask,
and what the model adds to the scores (T5), is all that counts.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.models.cases import ModelCase
from benchmarks.models.families import is_causal, make_model
from benchmarks.peers.flex import DEFAULT_BLOCK, block_mask_of
from benchmarks.peers.patterns import Pattern

SDPA, FLEX = "measured-sdpa", "measured-flex"


def whole_mask(case: ModelCase, pattern: Pattern) -> torch.Tensor:
    """Boolean (length, length): the pattern, and the model's own causal mask."""
    return pattern.dense.tril() if is_causal(case) else pattern.dense


def torch_model(case: ModelCase, pattern: Pattern, device: str, flex: bool = False, small: bool = False):
    """The case's model whose attention keeps what `whole_mask` says."""
    from transformers import AttentionInterface

    name = FLEX if flex else SDPA
    AttentionInterface.register(name, _attention(case, pattern, flex))
    return make_model(case, name, small).to(device)


@functools.cache
def _attention(case: ModelCase, pattern: Pattern, flex: bool):
    """One function for all models of a case: a compiled model would be compiled anew for another one."""
    keep = whole_mask(case, pattern)
    return _flex(keep) if flex else _sdpa(keep)


def _sdpa(keep: torch.Tensor):
    def attention(module, query, key, value, _mask, scaling=None, position_bias=None, **_options):
        mask = keep
        if position_bias is not None:
            mask = position_bias.masked_fill(~keep, float("-inf"))
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _flex(keep: torch.Tensor):
    block_mask = block_mask_of([keep], tuple(keep.shape), lambda b, h, i, j: keep[i, j], (DEFAULT_BLOCK, DEFAULT_BLOCK))

    def attention(module, query, key, value, _mask, scaling=None, position_bias=None, **_options):
        def add_bias(score, b, h, i, j):
            return score + position_bias[0, h, i, j]

        out = flex_attention(
            query,
            key,
            value,
            score_mod=None if position_bias is None else add_bias,
            block_mask=block_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).contiguous(), None

    return attention
