"""FlexPrefill: a pattern for each head, chosen in each call."""

from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.last_queries import check_prompt, sums_of_last
from stof_tvm.masks.runtime.pooled import pooled_scores
from stof_tvm.masks.runtime.rule import Rule, check_square
from stof_tvm.masks.runtime.selection import (
    block_distances,
    block_means,
    block_sums,
    check_mass,
    check_number,
    largest,
    most_mass,
)
from stof_tvm.masks.windows import causal as causal_mask


def flex_prefill(gamma: float = 0.9, tau: float = 0.1, least: int = 1024, block: int = 64) -> Rule:
    """A rule that chooses for each head between its heaviest blocks and columns and diagonals, and keeps j <= i.

    The weights that the means of blocks predict for the last block of queries are compared with their true ones
    (FlexPrefill, Lai et al., 2025).  A head where both are alike, by the square root of their Jensen-Shannon
    divergence, keeps the heaviest blocks of the whole map of means that hold `gamma` of its weight.  The others keep
    the fewest columns of blocks, and the fewest diagonals, that hold `gamma` of the last queries' weight each.  A
    diagonal stands for the distances from its block's number to the next one's; the published code counts columns and
    distances in single tokens, and takes as many blocks as they would fill.

    Parameters
    ----------
    gamma : float
        Share of the weight that is kept, above 0 and at most 1.
    tau : float
        The distance below which a head's means are trusted, 0 to 1; 0 trusts none, 1 all.
    least : int
        Tokens: every head keeps columns, and diagonals, of at least so many, rounded up to blocks, and of at least one
        block: the first column and the main diagonal.
    block : int
        Height and width of a block, a multiple of 32; 128 in the paper.

    Raises
    ------
    MaskError
        A number or a block that is none; when it is used, q and k of different lengths.
    """
    gamma, tau = check_mass("gamma", gamma), check_number("tau", tau, 0, 1)
    least, size = check_int("least", least), check_square("flex_prefill", block)
    text = f"flex_prefill(gamma={gamma}, tau={tau}, least={least}, block={block})"
    return Rule(_OfHeads(gamma, tau, max(1, -(-least // size)), size), (size, size), causal_mask(), text)


@dataclass(frozen=True)
class _OfHeads:
    """The rule's function, with its arguments."""

    gamma: float
    tau: float
    fewest: int
    size: int

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        gamma, size = self.gamma, self.size
        last = min(size, check_prompt("flex_prefill", q, k))
        true, by_distance = (block_sums(x / last, size) for x in sums_of_last(q, k, last))
        of_means = grouped_product(q[:, :, -last:].float().mean(2, True), block_means(k, size).transpose(-1, -2))
        predicted = (of_means * default_scale(q)).softmax(-1).squeeze(2)
        trusted = jensen_shannon(predicted, true).sqrt()[..., None] < self.tau
        first = torch.arange(true.shape[-1], device=q.device) == 0  # the first column and the main diagonal
        columns, diagonals = (
            (most_mass(x, gamma, first) & ~trusted) | largest(x.masked_fill(first, torch.inf), self.fewest)
            for x in (true, by_distance)
        )
        heaviest = most_mass(pooled_scores(q, k, (size, size), True).softmax(-1).flatten(2), gamma)
        left = block_distances(len(first), len(first), q.device)
        kept = columns.unsqueeze(2) | diagonals[..., left.clamp(min=0)]
        kept = kept | (heaviest & trusted).unflatten(2, left.shape)
        return kept & (left >= 0)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Float32 (...): the divergence, in nats, of distributions p and q, float32 (..., n); 0 log 0 is 0."""
    tiny = torch.finfo(torch.float32).tiny
    middle = ((p + q) / 2).clamp(min=tiny).log()
    terms = torch.stack([x * (x.clamp(min=tiny).log() - middle) for x in (p, q)])
    return (terms.sum((0, -1)) / 2).clamp(min=0)
