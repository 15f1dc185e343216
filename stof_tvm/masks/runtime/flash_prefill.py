"""FlashPrefill: blocks whose weight comes near the largest of their row, without sorting."""

from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.rule import Rule, check_square
from stof_tvm.masks.runtime.selection import block_distances, block_means, check_number, padded
from stof_tvm.masks.windows import causal as causal_mask


def flash_prefill(threshold: float = 0.1, sinks: int = 2, window: int = 4, last: int = 2, block: int = 64) -> Rule:
    """A rule that keeps blocks of at least a share of the heaviest one's weight in their row, and j <= i.

    A block's weight is the sum, over its queries, of the exponentials of their scores with the mean of its keys
    (FlashPrefill, Fan et al., 2026); queries see the blocks of keys that end before them.

    Parameters
    ----------
    threshold : float
        Share of the largest weight of the row of blocks, 0 to 1; 0 keeps everything.
    sinks, window : int
        The first blocks of keys, and the nearest ones up to a block's own, that are always kept.
    last : int
        The last blocks of queries, which keep everything.
    block : int
        Height and width of a block, a multiple of 32; 128 in the paper.

    Raises
    ------
    MaskError
        A number or a block that is none.
    """
    threshold, size = check_number("threshold", threshold, 0, 1), check_square("flash_prefill", block)
    given = {"sinks": sinks, "window": window, "last": last}
    sinks, window, last = (check_int(name, value) for name, value in given.items())

    text = f"flash_prefill({threshold}, sinks={sinks}, window={window}, last={last}, block={block})"
    return Rule(_NearLargest(threshold, sinks, window, last, size), (size, size), causal_mask(), text)


@dataclass(frozen=True)
class _NearLargest:
    """The rule's function, with its arguments."""

    threshold: float
    sinks: int
    window: int
    last: int
    size: int

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        weights = _weights(q, k, self.size)
        light = weights < self.threshold * weights.amax(-1, keepdim=True)  # not what is NaN
        rows, columns = weights.shape[2:]
        left = block_distances(rows, columns, q.device)
        at = torch.arange(max(rows, columns), device=q.device)
        forced = (at[:columns] < self.sinks) | (left < self.window) | (at[:rows, None] >= rows - self.last)
        return (~light | forced) & (left >= 0)


def _weights(q: torch.Tensor, k: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 (B, H, query blocks, key blocks): sums of exp(score - the largest of the queries' block)."""
    means = block_means(k, size).transpose(-1, -2)
    scores = grouped_product(q.float(), means) * default_scale(q)
    end = torch.arange(1, means.shape[-1] + 1, device=q.device) * size
    seen = end <= torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]
    scores = padded(scores.masked_fill(~seen, -torch.inf), 0, 0, 0, -q.shape[2] % size, value=-torch.inf)
    scores = scores.unflatten(2, (-1, size))
    most = scores.amax((3, 4), keepdim=True)
    return (scores - most.masked_fill(most == -torch.inf, 0)).exp().sum(3)
