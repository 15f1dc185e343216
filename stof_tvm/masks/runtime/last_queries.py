"""The exact weights of the last queries, from which positions of a whole prompt are guessed."""

import torch

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
    scores = grouped_product(q[:, :, -last:].float(), k.float().transpose(-1, -2)) * default_scale(q)
    i = torch.arange(length - last, length, device=q.device)[:, None]
    distance = i - torch.arange(length, device=q.device)
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    # Keys after the query have no weight: whichever distance they count for.
    of_rows = torch.gather(weights, -1, distance.clamp(min=0).expand_as(weights))  # by distance, in each row
    return weights.sum(2), of_rows.masked_fill(distance < 0, 0).sum(2)
