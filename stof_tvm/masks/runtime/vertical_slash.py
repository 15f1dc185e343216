"""MInference's vertical and slash positions, found from the last queries."""

from collections.abc import Callable
from dataclasses import dataclass

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

    text = f"vertical_slash({vertical}, {slash}, last={last}, sinks={sinks}, window={window}, block={block})"
    return Rule(_VerticalSlash(vertical, slash, last, sinks, window, size), size, causal_mask(), text)


@dataclass(frozen=True)
class _VerticalSlash:
    """The rule's function, with its arguments."""

    vertical: int
    slash: int
    last: int
    sinks: int
    window: int
    block: tuple[int, int]

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.in_rows(q, k)(0, -(-q.shape[2] // self.block[0]))

    def in_rows(self, q: torch.Tensor, k: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        length = check_prompt("vertical_slash", q, k)
        by_key, by_distance = sums_of_last(q, k, min(self.last, length))
        columns = _chosen(by_key, max(self.vertical, self.sinks), self.sinks)
        distances = _chosen(by_distance, max(self.slash, self.window), self.window)
        before = _before(columns), _before(distances)
        return lambda first, end: _blocks(*before, length, self.block, first, end)


def _chosen(sums: torch.Tensor, n: int, forced: int) -> torch.Tensor:
    """Boolean like sums (B, H, S): the first `forced`, and the largest of the others, n in all, or more beside NaN."""
    first = torch.arange(sums.shape[-1], device=sums.device) < forced
    chosen = sums.masked_fill(first, torch.inf).topk(min(n, sums.shape[-1]), dim=-1).indices
    # NaN is larger than infinity, and must not take the place of what is always chosen.
    return torch.zeros_like(sums, dtype=torch.bool).scatter(-1, chosen, True) | first


def _before(chosen: torch.Tensor) -> torch.Tensor:
    """int32 (B, H, S + 1): how many of chosen (B, H, S), boolean, come before each place."""
    zero = torch.zeros((*chosen.shape[:-1], 1), dtype=torch.int32, device=chosen.device)
    return torch.cat([zero, chosen.cumsum(-1, dtype=torch.int32)], -1)


def _blocks(
    columns: torch.Tensor, distances: torch.Tensor, length: int, size: tuple[int, int], first: int, end: int
) -> torch.Tensor:
    """Boolean (B, H, end - first, key blocks): those with a pair j <= i of a chosen column or distance.

    Of columns and distances, int32 (B, H, S + 1), it is known how many are chosen before each; the rows are those of
    the query blocks from `first` to `end`.
    """
    device = columns.device
    first_row = torch.arange(first * size[0], min(end * size[0], length), size[0], device=device)
    first_key = torch.arange(0, length, size[1], device=device)
    last_row, last_key = ((x + n).clamp(max=length) - 1 for x, n in zip((first_row, first_key), size))
    # Columns of a block that some row of it reaches.
    starts = first_key.expand(len(first_row), -1)
    ends = torch.minimum(last_key, last_row[:, None]) + 1
    hit = columns[..., ends.clamp(min=0)] > columns[..., torch.minimum(starts, ends)]
    # The distances i - j of a block are all from its upper right to its lower left corner.
    low = (first_row[:, None] - last_key).clamp(min=0)
    high = (last_row[:, None] - first_key + 1).clamp(min=0)
    return hit | (distances[..., high] > distances[..., torch.minimum(low, high)])
