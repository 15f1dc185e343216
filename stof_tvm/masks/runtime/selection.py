"""What rules share: pooled blocks, what a causal mask reaches, weights of blocks, selection by number and by mass."""

import torch
from torch.nn.functional import pad

from stof_tvm.masks.quality.weights import is_on_gpu
from stof_tvm.masks.runtime.on_gpu import largest_on_gpu
from tir_kernels.errors import MaskError


def check_number(name: str, value, least: float, largest: float) -> float:
    """The value; MaskError unless it is a number from `least` to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= largest:
        raise MaskError(f"{name}={value!r} must be a number from {least} to {largest}")
    return value


def check_mass(name: str, value) -> float:
    """The value; MaskError unless it is a share that can be kept, above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise MaskError(f"{name}={value!r} must be a number above 0, at most 1")
    return value


def padded(x: torch.Tensor, *widths: int, value: float = 0.0) -> torch.Tensor:
    """x, as `torch.nn.functional.pad` pads it by widths; itself, not a copy, where all are 0."""
    return pad(x, widths, value=value) if any(widths) else x


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 (B, H, blocks, D): the mean of each block of `size` tokens of x (B, H, S, D); the last may be short."""
    whole = x.shape[2] // size * size
    means = x[:, :, :whole].unflatten(2, (-1, size)).sum(3, dtype=torch.float32) / size if whole else None
    if whole == x.shape[2] and means is not None:
        return means
    rest = x[:, :, whole:].sum(2, keepdim=True, dtype=torch.float32) / (x.shape[2] - whole)
    return rest if means is None else torch.cat([means, rest], 2)


def block_sums(x: torch.Tensor, size: int) -> torch.Tensor:
    """Like x (..., n), floating point: (..., blocks), the sum of each run of `size`; the last may be short."""
    return padded(x, 0, -x.shape[-1] % size).unflatten(-1, (-1, size)).sum(-1)


def reachable(q_len: int, kv_len: int, block: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Boolean (query blocks, key blocks): those that hold a pair j <= i."""
    last_row = (torch.arange(0, q_len, block[0], device=device) + block[0]).clamp(max=q_len) - 1
    return torch.arange(0, kv_len, block[1], device=device) <= last_row[:, None]


def block_distances(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """int64 (rows, columns): how many blocks a block lies left of the diagonal; negative to its right."""
    return torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)


def block_weights(scores: torch.Tensor, each: tuple[int, int], causal: bool) -> torch.Tensor:
    """Float32 (B, H, query blocks, key blocks): the softmax along the keys of the scores of groups, summed by block.

    Scores are float32 (B, H, query groups, key groups); a block is `each` groups high and wide.  With `causal`, a group
    of queries sees the groups of keys up to its own.
    """
    if causal:
        left = block_distances(scores.shape[2], scores.shape[3], scores.device) >= 0
        scores = scores.masked_fill(~left, -torch.inf)
    weights = padded(scores.softmax(-1), 0, -scores.shape[3] % each[1], 0, -scores.shape[2] % each[0])
    return weights.unflatten(2, (-1, each[0])).unflatten(4, (-1, each[1])).sum((3, 5))


def largest(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Boolean like scores (..., blocks): the n largest of each row; all where there are not more; never one of -inf.

    NaN is larger than any number, so what is computed from it is kept.
    """
    if is_on_gpu(scores):
        return largest_on_gpu(scores, n)
    chosen = scores.topk(min(n, scores.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    return kept & (scores != -torch.inf)


def most_mass(weights: torch.Tensor, mass: float, forced: torch.Tensor | None = None) -> torch.Tensor:
    """Boolean like weights (..., blocks), not negative: the fewest of each row that hold `mass` of its sum.

    Blocks that are `forced`, boolean and broadcastable, are kept and counted first; the others by falling weight,
    while what comes before holds less; with a mass of 1 all that weigh something.  A row with NaN keeps all that may.
    """
    forced = torch.zeros_like(weights, dtype=torch.bool) if forced is None else forced.expand_as(weights)
    if mass == 1:  # whatever rounding makes of sums
        return forced | ~(weights <= 0)
    first = weights.masked_fill(~forced, 0).sum(-1, keepdim=True)
    others, order = weights.masked_fill(forced, 0).sort(dim=-1, descending=True, stable=True)
    before = first + others.cumsum(-1) - others
    enough = before >= mass * weights.sum(-1, keepdim=True)
    wanted = ~enough & ~(others <= 0)
    return forced | torch.zeros_like(forced).scatter(-1, order, wanted)


def within_mass(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Boolean like weights (..., blocks), not negative: the heaviest of each row that hold at most `mass` of its sum.

    The heaviest one always; all of a row with NaN.
    """
    falling, order = weights.sort(dim=-1, descending=True, stable=True)
    sums = falling.cumsum(-1)
    first = torch.arange(weights.shape[-1], device=weights.device) == 0
    wanted = ~(sums > mass * sums[..., -1:]) | first
    return torch.zeros_like(wanted).scatter(-1, order, wanted)
