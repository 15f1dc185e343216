"""MInference's vertical and slash positions, found from the last queries."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.quality.weights import is_on_gpu
from stof_tvm.masks.runtime.last_queries import check_prompt, sums_of_last
from stof_tvm.masks.runtime.on_gpu import vertical_slash_on_gpu
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.windows import causal as causal_mask
from tir_kernels.selection.vertical_slash_map import takes


def vertical_slash(vertical: int, slash: int, last: int = 64, sinks: int = 30, window: int = 100, block=64) -> Rule:
    """A rule that keeps the blocks of the columns and diagonals that the last queries weigh most, and j <= i.

    The exact weights of the last queries are summed by key and by distance (MInference, Jiang et al., 2024).  Whole
    blocks that hold a chosen pair are kept; the published kernel gathers single columns instead.  On Hopper blocks of
    (128, 32) are the fastest.

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
        sums = sums_of_last(q, k, min(self.last, length))
        forced = self.sinks, self.window
        places = [_heaviest(x, n, least) for x, n, least in zip(sums, (self.vertical, self.slash), forced)]
        if is_on_gpu(places[0]) and takes(self.block):
            return lambda first, end: vertical_slash_on_gpu(places, forced, (first, end), length, self.block)
        columns, distances = (_before(_chosen(x, least, length)) for x, least in zip(places, forced))
        of_columns = _blocks_of_columns(columns, length, self.block)
        of_distances = _blocks_of_distances(distances, length, self.block)
        return lambda first, end: of_columns(first, end) | of_distances(first, end)


def _heaviest(sums: torch.Tensor, n: int, forced: int) -> torch.Tensor:
    """int64 (B, H, any): the places of the largest of sums (B, H, S) behind the first `forced`, each less `forced`.

    With these there are n in all, where there are as many.  NaN is the largest.
    """
    length = sums.shape[-1]
    return sums[..., forced:].topk(max(min(n, length) - forced, 0), dim=-1, sorted=False).indices


def _chosen(places: torch.Tensor, forced: int, length: int) -> torch.Tensor:
    """Boolean (B, H, length): the first `forced`, and the places behind them, int64 (B, H, any), each less `forced`."""
    first = torch.arange(length, device=places.device) < forced
    first = first.expand(*places.shape[:-1], -1)
    return first.scatter(-1, places + forced, True) if places.shape[-1] else first


def _before(chosen: torch.Tensor) -> torch.Tensor:
    """int32 (B, H, S + 1): how many of chosen (B, H, S), boolean, come before each place."""
    zero = torch.zeros((*chosen.shape[:-1], 1), dtype=torch.int32, device=chosen.device)
    return torch.cat([zero, chosen.cumsum(-1, dtype=torch.int32)], -1)


def _blocks_of_columns(columns: torch.Tensor, length: int, size: tuple[int, int]) -> Callable[[int, int], torch.Tensor]:
    """Maps rows of blocks, from the first to the end, to booleans (B, H, rows, key blocks): those with a chosen column.

    Of the columns, int32 (B, H, S + 1), it is known how many are chosen before each.  A column counts for the rows that
    reach it, j <= i.  What is kept for the rows has a number for each block of keys and of queries.
    """
    first_key, last_key = _edges(length, size[1], columns.device)
    _, last_row = _edges(length, size[0], columns.device)
    whole = columns[..., last_key + 1] > columns[..., first_key]
    block = torch.arange(len(first_key), device=columns.device)
    diagonal = torch.div(last_row, size[1], rounding_mode="floor")  # the block in which a row's last query ends
    cut = columns[..., last_row + 1] > columns[..., diagonal * size[1]]

    def rows(first: int, end: int) -> torch.Tensor:
        last = diagonal[first:end, None]
        return (whole[..., None, :] & (block < last)) | (cut[..., first:end, None] & (block == last))

    return rows


def _blocks_of_distances(
    distances: torch.Tensor, length: int, size: tuple[int, int]
) -> Callable[[int, int], torch.Tensor]:
    """The same of distances i - j: a block has all of those from its upper right to its lower left corner.

    So the blocks of a diagonal are alike, but for those in a last row that is cut off.
    """
    device, step = distances.device, math.gcd(*size)
    first_row, last_row = _edges(length, size[0], device)
    first_key, last_key = _edges(length, size[1], device)
    behind = int((len(first_key) - 1) * size[1] // step)  # diagonals above that of block (0, 0)
    corner = (torch.arange(behind + (len(first_row) - 1) * size[0] // step + 1, device=device) - behind) * step
    alike = _any_between(distances, corner - size[1] + 1, corner + size[0])
    in_last = _any_between(distances, first_row[-1] - last_key, last_row[-1] - first_key + 1)
    above = torch.arange(len(first_key), device=device) * (size[1] // step)

    def rows(first: int, end: int) -> torch.Tensor:
        found = alike[..., torch.arange(first, end, device=device)[:, None] * (size[0] // step) + behind - above]
        return found if end < len(first_row) else torch.cat([found[..., :-1, :], in_last[..., None, :]], -2)

    return rows


def _edges(length: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 (blocks,), twice: the first and the last token of each block."""
    first = torch.arange(0, length, size, device=device)
    return first, (first + size).clamp(max=length) - 1


def _any_between(before: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Whether something is chosen at one of the places low … high - 1, of which `before` has how many come before."""
    low, high = (x.clamp(0, before.shape[-1] - 1) for x in (low, high))
    return before[..., high] > before[..., torch.minimum(low, high)]
