"""Rules by the scores of pooled blocks."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_flag, check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.runtime.selection import block_means, largest, reachable
from stof_tvm.masks.windows import causal as causal_mask
from tir_kernels.errors import MaskError

POOLS = MEAN, BOUNDS = "mean", "bounds"
HELD = 1 << 26  # bounds of rows that are held at a time


def top_blocks(k: int, block=64, causal: bool = False, pool: str = MEAN) -> Rule:
    """A rule that keeps, for each block of queries, the k blocks of keys whose pooled scores are the largest.

    With the means of blocks, the score of two blocks is the product of the mean of the queries and the mean of the
    keys: the fine stage of VSA (Zhang et al., 2025) and the block-sparse pattern of MInference (Jiang et al., 2024).
    With bounds, it is what no score in the block exceeds: a query's product with a key is at most the sum over channels
    of the larger of its products with the least and the largest element of the block's keys, as Quest has it for pages
    of a cache (Tang et al., 2024); a block of queries has the largest of its rows' bounds.  Bounds see single keys that
    a mean hides; they cost as many products as queries have, instead of one for each block of them.

    Parameters
    ----------
    k : int
        Blocks of keys for each block of queries, at least 1.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32.
    causal : bool
        Keep j <= i only; blocks that hold no such pair are not chosen.
    pool : str
        "mean" or "bounds".

    Raises
    ------
    MaskError
        A number, a block or a pool that is none.
    """
    k, size, causal = check_int("k", k, least=1), check_block(block), check_flag("causal", causal)
    if pool not in POOLS:
        raise MaskError(f"pool={reprlib.repr(pool)} must be 'mean' or 'bounds'")
    top = (_TopMeans if pool == MEAN else _TopBounds)(k, size, causal)
    text = f"top_blocks({k}, block={block}" + ", causal=True" * causal + f", pool='{pool}'" * (pool != MEAN) + ")"
    return Rule(top, size, causal_mask() if causal else None, text)


@dataclass(frozen=True)
class _TopMeans:
    """The rule's function for means of blocks, with its arguments."""

    k: int
    block: tuple[int, int]
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.in_rows(q, k)(0, -(-q.shape[2] // self.block[0]))

    def in_rows(self, q: torch.Tensor, k: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        queries, keys = _pooled(q, k, self.block)
        reached = reachable(q.shape[2], k.shape[2], self.block, q.device) if self.causal else None

        def rows(first: int, end: int) -> torch.Tensor:
            scores = grouped_product(queries[:, :, first:end], keys)
            return largest(scores if reached is None else scores.masked_fill(~reached[first:end], -torch.inf), self.k)

        return rows


@dataclass(frozen=True)
class _TopBounds:
    """The rule's function for bounds, with its arguments."""

    k: int
    block: tuple[int, int]
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return largest(bounding_scores(q, k, self.block, self.causal), self.k)


def _pooled(q: torch.Tensor, k: torch.Tensor, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 (B, H, query blocks, D) and (B, Hkv, D, key blocks): the means of blocks, queries times the scale."""
    return block_means(q, size[0]) * default_scale(q), block_means(k, size[1]).transpose(-1, -2)


def pooled_scores(q: torch.Tensor, k: torch.Tensor, size: tuple[int, int], causal: bool) -> torch.Tensor:
    """Float32 (B, H, query blocks, key blocks): the scores of the blocks' means; -inf what a causal mask empties."""
    return _reachable(grouped_product(*_pooled(q, k, size)), q, k, size, causal)


def bounding_scores(q: torch.Tensor, k: torch.Tensor, size: tuple[int, int], causal: bool) -> torch.Tensor:
    """Float32 (B, H, query blocks, key blocks): what no product q·k of a block exceeds; -inf as `pooled_scores`.

    A channel's larger product is that of q's positive part with the largest element, or of its negative part with the
    least: two matrix products, of some blocks of rows at a time.
    """
    low, high = (x.transpose(-1, -2) for x in _extremes(k, size[1]))
    batch, heads, length, _ = q.shape
    step = max(1, HELD // (batch * heads * size[0] * low.shape[-1])) * size[0]
    bounds = []
    for some in q.split(step, 2):
        of_rows = grouped_product(some.clamp(min=0), high) + grouped_product(some.clamp(max=0), low)
        bounds.append(_largest_of_blocks(of_rows, size[0]))
    found = bounds[0] if len(bounds) == 1 else torch.cat(bounds, 2)
    return _reachable(found * default_scale(q), q, k, size, causal)


def _extremes(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each channel in each block of tokens of x (B, H, S, D); the last may be short."""
    return -_largest_of_blocks(-x, size), _largest_of_blocks(x, size)


def _largest_of_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Like x (B, H, n, m): (B, H, blocks, m), the largest of each run of `size` along n; the last may be short."""
    whole = x.shape[2] // size * size
    parts = [x[:, :, :whole].unflatten(2, (-1, size)).amax(3)] if whole else []
    parts += [x[:, :, whole:].amax(2, keepdim=True)] if whole < x.shape[2] else []
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _reachable(scores, q: torch.Tensor, k: torch.Tensor, size: tuple[int, int], causal: bool) -> torch.Tensor:
    """The scores, -inf where a causal mask empties the block."""
    if not causal:
        return scores
    return scores.masked_fill(~reachable(q.shape[2], k.shape[2], size, q.device), -torch.inf)
