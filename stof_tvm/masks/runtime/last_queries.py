"""The exact weights of the last queries, from which positions of a whole prompt are guessed."""

import torch
from torch.nn.functional import pad

from stof_tvm.masks.quality.weights import default_scale, grouped_product
from tir_kernels.errors import MaskError


def check_prompt(name: str, q: torch.Tensor, k: torch.Tensor) -> int:
    """The length of a prompt, q (B, H, S, D) and k (B, Hkv, S, D); MaskError by the rule's name where they differ."""
    if k.shape[2] != q.shape[2]:
        raise MaskError(f"{name} is for prompts: q has {q.shape[2]} tokens, k {k.shape[2]}")
    return q.shape[2]


def sums_of_last(q: torch.Tensor, k: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 (B, H, S), twice: the causal weights of the last queries, summed by key and by distance."""
    length = q.shape[2]
    scores = grouped_product(q[:, :, -last:], k.transpose(-1, -2))
    future = torch.arange(length, device=q.device) > torch.arange(length - last, length, device=q.device)[:, None]
    bias = torch.zeros(last, length, device=q.device).masked_fill(future, -torch.inf)
    weights = torch.add(bias, scores, alpha=default_scale(q)).softmax(-1)
    # Equal distances of all rows are brought into one column: with a width of one more, each row begins one earlier.
    wide = pad(weights, (last - 1, 0))
    skewed = pad(wide.flatten(2), (0, last)).unflatten(2, (last, wide.shape[3] + 1))[..., :length]
    return weights.sum(2), skewed.sum(2).flip(-1)
