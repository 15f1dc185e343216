"""The exact weights of the last queries, from which positions of a whole prompt are guessed."""

import torch
from torch.nn.functional import pad

from stof_tvm.masks.quality.weights import default_scale, grouped_product, is_on_gpu
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
    if not is_on_gpu(weights):
        return weights.sum(2), _diagonals(weights).flip(-1)
    # Diagonals that all rows have need no copy; the others are in the corner of the first keys.
    *stack, row, one = weights.stride()
    inner = weights.as_strided((*weights.shape[:2], last, length - last + 1), (*stack, row + one, one)).sum(2)
    corner = _diagonals(weights[..., : last - 1])[..., : last - 1] if last > 1 else inner[..., :0]
    return weights.sum(2), torch.cat([corner, inner], -1).flip(-1)


def _diagonals(weights: torch.Tensor) -> torch.Tensor:
    """Like weights (B, H, rows, n): (B, H, n), the sums over the rows r of column c - (rows - 1) + r, for each c."""
    rows, length = weights.shape[2:]
    wide = pad(weights, (rows - 1, 0))
    # With a width of one more, each row begins one earlier, and diagonals are columns.
    skewed = pad(wide.flatten(2), (0, rows)).unflatten(2, (rows, wide.shape[3] + 1))[..., :length]
    return skewed.sum(2)
