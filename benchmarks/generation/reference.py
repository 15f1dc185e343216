"""Attention of the models that results are checked against, in memory that long prompts in float32 leave room for.

PyTorch's attention of grouped queries in float32 holds all scores; with repeated keys it has a kernel that does not.
"""

import torch
import torch.nn.functional as F

NAME = "measured-reference"  # transformers' attn_implementation


def register() -> None:
    """Make the attention known to transformers, with the masks that it makes for "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(module, query, key, value, mask, scaling=None, **_options) -> tuple[torch.Tensor, None]:
    shared = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
