"""Eager PyTorch with a mask of ours, so that it computes what an engine computes."""

import math

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from stof_tvm.masks import Mask, causal

# Largest difference over the largest value, by the dtype of the results.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class MaskedSdpa:
    """Within, every `F.scaled_dot_product_attention` also has the mask; other spellings of attention are left alone.

    Attributes
    ----------
    calls : int
        How often it was called within.
    """

    def __init__(self, mask: Mask):
        self.calls, self._mask, self._dense, self._plain = 0, mask, {}, F.scaled_dot_product_attention

    def __enter__(self):
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it computes attention in C++
        F.scaled_dot_product_attention = self._masked  # type: ignore[assignment]  # PyTorch's is a builtin
        return self

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self._plain
        torch.backends.mha.set_fastpath_enabled(self._fast)

    def _masked(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        self.calls += 1
        keep = self._keep(query.shape[-2], key.shape[-2], is_causal, query.device)
        if attn_mask is not None:
            boolean = attn_mask.dtype == torch.bool
            keep = attn_mask & keep if boolean else attn_mask.masked_fill(~keep, float("-inf"))
        return self._plain(query, key, value, keep, dropout_p, **more)

    def _keep(self, q_len, kv_len, is_causal, device) -> torch.Tensor:
        """The boolean mask, made once, so that the making is not timed."""
        key = q_len, kv_len, is_causal
        if key not in self._dense:
            mask = self._mask & causal() if is_causal else self._mask
            self._dense[key] = mask.dense(q_len, kv_len).to(device)
        return self._dense[key]


def compare(actual, expected) -> dict:
    """How far results are apart, as the worst of their tensors shows.

    {"matches": bool, "error": largest difference, "largest": largest value expected}; both are None where they are not
    finite.
    """
    rows = [
        _compare(x, y)
        for x, y in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
        if isinstance(y, torch.Tensor)
    ]
    return min(rows, key=lambda row: (row["matches"], -row["error"] if row["error"] is not None else 0.0))


def _compare(actual: torch.Tensor, expected: torch.Tensor) -> dict:
    error = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    if not math.isfinite(error):
        return {"matches": False, "error": None, "largest": None}
    return {"matches": error <= TOLERANCE.get(expected.dtype, 0.0) * largest, "error": error, "largest": largest}
