"""MInference's vertical and slash positions, found from the last queries."""

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.runtime.last_queries import check_prompt, sums_of_last
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.windows import causal as causal_mask


def vertical_slash(vertical: int, slash: int, last: int = 64, sinks: int = 30, window: int = 100, block=64) -> Rule:
    """A rule that keeps the blocks of the columns and diagonals that the last queries weigh most, and j <= i.

    The exact weights of the last queries are summed by key and by distance (MInference, Jiang et al., 2024).  Whole
    blocks that hold a chosen pair are kept; the published kernel gathers single columns instead.

    Parameters
    ----------
    vertical, slash : int
        How many columns and how many distances are chosen, at least `sinks` and `window` of them where there are as
        many: those are among the chosen.
    last : int
        How many of the last queries are looked at, at least 1.
    sinks, window : int
        The first keys, and the smallest distances, that are always chosen.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32.

    Raises
    ------
    MaskError
        A number or a block that is none; when it is used, q and k of different lengths.
    """
    given = {"vertical": vertical, "slash": slash, "sinks": sinks, "window": window}
    vertical, slash, sinks, window = (check_int(name, value) for name, value in given.items())
    last, size = check_int("last", last, least=1), check_block(block)

    def found(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        length = check_prompt("vertical_slash", q, k)
        by_key, by_distance = sums_of_last(q, k, min(last, length))
        columns = _chosen(by_key, max(vertical, sinks), sinks)
        distances = _chosen(by_distance, max(slash, window), window)
        return _blocks(columns, distances, size)

    text = f"vertical_slash({vertical}, {slash}, last={last}, sinks={sinks}, window={window}, block={block})"
    return Rule(found, size, causal_mask(), text)


def _chosen(sums: torch.Tensor, n: int, forced: int) -> torch.Tensor:
    """Boolean like sums (B, H, S): the first `forced`, and the largest of the others, n in all."""
    first = torch.arange(sums.shape[-1], device=sums.device) < forced
    chosen = sums.masked_fill(first, torch.inf).topk(min(n, sums.shape[-1]), dim=-1).indices
    return torch.zeros_like(sums, dtype=torch.bool).scatter(-1, chosen, True)


def _blocks(columns: torch.Tensor, distances: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Boolean (B, H, query blocks, key blocks): those with a pair j <= i of a chosen column or distance."""
    length, device = columns.shape[-1], columns.device
    first_row, first_key = (torch.arange(0, length, n, device=device) for n in size)
    last_row, last_key = ((x + n).clamp(max=length) - 1 for x, n in zip((first_row, first_key), size))
    zero = torch.zeros((*columns.shape[:-1], 1), dtype=torch.int32, device=device)
    before = [
        torch.cat([zero, x.cumsum(-1, dtype=torch.int32)], -1) for x in (columns, distances)
    ]  # how many come before each place
    # Columns of a block that some row of it reaches.
    first = first_key.expand(len(first_row), -1)
    end = torch.minimum(last_key, last_row[:, None]) + 1
    hit = before[0][..., end.clamp(min=0)] > before[0][..., torch.minimum(first, end)]
    # The distances i - j of a block are all from its upper right to its lower left corner.
    low = (first_row[:, None] - last_key).clamp(min=0)
    high = (last_row[:, None] - first_key + 1).clamp(min=0)
    return hit | (before[1][..., high] > before[1][..., torch.minimum(low, high)])
