"""What rules share: means of blocks, the blocks that a causal mask reaches, selection by number and by mass."""

import torch


def block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 (B, H, blocks, D): the mean of each block of `size` tokens of x (B, H, S, D); the last may be short."""
    length = x.shape[2]
    blocks = -(-length // size)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, blocks * size - length))
    starts = torch.arange(blocks, device=x.device) * size
    counts = (length - starts).clamp(max=size)
    return padded.unflatten(2, (blocks, size)).sum(3) / counts[:, None]


def reachable(q_len: int, kv_len: int, block: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Boolean (query blocks, key blocks): those that hold a pair j <= i."""
    last_row = (torch.arange(0, q_len, block[0], device=device) + block[0]).clamp(max=q_len) - 1
    return torch.arange(0, kv_len, block[1], device=device) <= last_row[:, None]


def largest(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Boolean like scores (..., blocks): the n largest of each row; all where there are not more; never one of -inf.

    NaN is larger than any number, so what is computed from it is kept.
    """
    chosen = scores.topk(min(n, scores.shape[-1]), dim=-1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    return kept & (scores != -torch.inf)


def most_mass(weights: torch.Tensor, mass: float, forced: torch.Tensor) -> torch.Tensor:
    """Boolean like weights (..., blocks), not negative: the fewest of each row that hold `mass` of its sum.

    Blocks that are `forced`, boolean and broadcastable, are kept and counted first; the others by falling weight,
    while what comes before holds less.  A row with NaN keeps all that may weigh something.
    """
    forced = forced.expand_as(weights)
    first = weights.masked_fill(~forced, 0).sum(-1, keepdim=True)
    others, order = weights.masked_fill(forced, 0).sort(dim=-1, descending=True, stable=True)
    before = first + others.cumsum(-1) - others
    enough = before >= mass * weights.sum(-1, keepdim=True)
    wanted = ~enough & ~(others <= 0)
    return forced | torch.zeros_like(forced).scatter(-1, order, wanted)
