"""The exact weights of the last queries, from which positions of a whole prompt are guessed."""

import torch
from torch.nn.functional import pad

from stof_tvm.masks.quality.weights import default_scale, grouped_product, is_on_gpu
from stof_tvm.masks.runtime.on_gpu import sums_of_last_on_gpu
from tir_kernels.errors import MaskError

HELD = 1 << 26  # scores of the heads that share keys; where there are more, a part of the keys is taken at a time


def check_prompt(name: str, q: torch.Tensor, k: torch.Tensor) -> int:
    """The length of a prompt, q (B, H, S, D) and k (B, Hkv, S, D); MaskError by the rule's name where they differ."""
    if k.shape[2] != q.shape[2]:
        raise MaskError(f"{name} is for prompts: q has {q.shape[2]} tokens, k {k.shape[2]}")
    return q.shape[2]


def sums_of_last(q: torch.Tensor, k: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 (B, H, S), twice: the causal weights of the last queries, summed by key and by distance."""
    queries = q[:, :, -last:]
    if type(q) is torch.Tensor and last * q.shape[1] // k.shape[1] * k.shape[2] > HELD:
        return _sums_in_parts(queries, k, max(last, HELD // (8 * q.shape[0] * q.shape[1] * last)))
    if is_on_gpu(queries):
        return sums_of_last_on_gpu(grouped_product(queries, k.transpose(-1, -2)), default_scale(queries))
    weights = _scores(queries, k, 0).softmax(-1)
    return weights.sum(2), _diagonals(weights).flip(-1)


def _scores(queries: torch.Tensor, k: torch.Tensor, first: int, length: int | None = None) -> torch.Tensor:
    """Float32 (B, H, rows, n): the scaled scores of the last queries with n keys from `first` on; -inf later keys.

    `length` is that of the attention, that of k by default.
    """
    rows, n, device = queries.shape[2], k.shape[2], queries.device
    length = n if length is None else length
    scores = grouped_product(queries, k.transpose(-1, -2))
    future = torch.arange(first, first + n, device=device) > torch.arange(length - rows, length, device=device)[:, None]
    bias = torch.zeros(rows, n, device=device).masked_fill(future, -torch.inf)
    return torch.add(bias, scores, alpha=default_scale(queries))


def _sums_in_parts(queries: torch.Tensor, k: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the last queries alone, `step` keys at a time, at least `rows`: scores are computed twice."""
    (batch, heads, rows, _), length = queries.shape, k.shape[2]
    starts = range(0, length, step)
    sums = [_scores(queries, k[:, :, at : at + step], at, length).logsumexp(-1, keepdim=True) for at in starts]
    whole = torch.cat(sums, -1).logsumexp(-1, keepdim=True)
    whole = whole.masked_fill(whole == torch.inf, torch.nan)  # as a softmax has it
    by_key, by_distance = (torch.zeros(batch, heads, length, device=queries.device) for _ in range(2))
    for at in starts:
        weights = _scores(queries, k[:, :, at : at + step], at, length).sub_(whole).exp_()
        n = weights.shape[-1]
        by_key[..., at : at + n] = weights.sum(2)
        # Row r and key `at` + c have the distance length - rows + r - at - c: each part of these diagonals is in order.
        diagonals = _all_diagonals(weights).flip(-1)
        nearest = length - rows - at - (n - 1)  # that of row 0 and the last key; 0 and what is nearer is no weight
        skipped = max(0, -nearest)
        by_distance[..., nearest + skipped : nearest + rows + n - 1] += diagonals[..., skipped:]
    return by_key, by_distance


def _all_diagonals(weights: torch.Tensor) -> torch.Tensor:
    """Like weights (B, H, rows, n): (B, H, rows + n - 1), the sums over r of column c - (rows - 1) + r, for each c."""
    rows, n = weights.shape[2:]
    if not is_on_gpu(weights) or n < rows:
        return _diagonals(pad(weights, (0, rows - 1)))
    left = _diagonals(weights[..., : rows - 1])[..., : rows - 1]
    right = _diagonals(pad(weights[..., n - (rows - 1) :], (0, rows - 1)))[..., rows - 1 :]
    return torch.cat([left, _whole_diagonals(weights), right], -1) if rows > 1 else weights.squeeze(2)


def _whole_diagonals(weights: torch.Tensor) -> torch.Tensor:
    """Like weights (B, H, rows, n): (B, H, n - rows + 1), the sums of the diagonals that all rows have, not copied."""
    *stack, row, one = weights.stride()
    rows, n = weights.shape[2:]
    return weights.as_strided((*weights.shape[:2], rows, n - rows + 1), (*stack, row + one, one)).sum(2)


def _diagonals(weights: torch.Tensor) -> torch.Tensor:
    """Like weights (B, H, rows, n): (B, H, n), the sums over the rows r of column c - (rows - 1) + r, for each c."""
    rows, length = weights.shape[2:]
    wide = pad(weights, (rows - 1, 0))
    # With a width of one more, each row begins one earlier, and diagonals are columns.
    skewed = pad(wide.flatten(2), (0, rows)).unflatten(2, (rows, wide.shape[3] + 1))[..., :length]
    return skewed.sum(2)
