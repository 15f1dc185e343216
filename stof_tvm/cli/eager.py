"""Eager PyTorch with a mask of ours, so that it computes what an engine computes."""

import contextlib

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from stof_tvm.masks import Mask

# Largest difference over the largest value, by the dtype of the results.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@contextlib.contextmanager
def masked_sdpa(mask):
    """Within, every `F.scaled_dot_product_attention` also has a mask; yields a list that grows by one at each call.

    Other spellings of attention, and masks by module path, are left alone, and not counted.
    """
    plain, fast, calls, dense = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled(), [], {}

    def masked(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        calls.append(query.shape)
        lengths = query.shape[-2], key.shape[-2]
        if lengths not in dense:
            dense[lengths] = mask.dense(*lengths).to(query.device)
        keep = dense[lengths]
        if is_causal:
            keep = keep & torch.ones(lengths, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            both = attn_mask.dtype == torch.bool
            keep = attn_mask & keep if both else attn_mask.masked_fill(~keep, float("-inf"))
        return plain(query, key, value, keep, dropout_p, **more)

    if not isinstance(mask, Mask):
        yield calls
        return
    F.scaled_dot_product_attention = masked
    torch.backends.mha.set_fastpath_enabled(False)  # it would compute attention in C++
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = plain
        torch.backends.mha.set_fastpath_enabled(fast)


def compare(actual, expected) -> dict:
    """How far results are apart: {"matches", "error": largest difference, "largest": largest value expected}."""
    pairs = [
        (x.float(), y.float(), y.dtype)
        for x, y in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
        if isinstance(y, torch.Tensor)
    ]
    error = max((x - y).abs().max().item() for x, y, _ in pairs)
    largest = max(y.abs().max().item() for _, y, _ in pairs)
    tolerance = max(TOLERANCE.get(dtype, 0.0) for *_, dtype in pairs)
    return {"matches": error <= tolerance * largest, "error": error, "largest": largest}
