"""SpargeAttention: blocks by the mass of pooled scores, where blocks are alike enough to be pooled."""

from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_flag
from stof_tvm.masks.runtime.pooled import pooled_scores
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.runtime.selection import block_means, check_mass, check_number, reachable, within_mass
from stof_tvm.masks.windows import causal as causal_mask


def sparge(mass: float = 0.98, similarity: float = 0.6, block=64, causal: bool = False) -> Rule:
    """A rule that keeps the heaviest blocks by the softmax of pooled scores, and all that cannot be pooled.

    A block whose tokens do not point the same way is not like its mean (SpargeAttention, Zhang et al., 2025): such
    blocks of queries keep all keys, and such blocks of keys are kept by all queries and left out of the softmax.  Of
    the others, each block of queries keeps the heaviest that hold at most `mass` of the weight, and always the first.

    Parameters
    ----------
    mass : float
        Share of the weight, above 0 and at most 1.
    similarity : float
        Blocks are pooled where the cosines of their pairs of tokens are above it on average, -1 to 1: -1 pools all.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32; (128, 64) in the paper.
    causal : bool
        Keep j <= i only; blocks that hold no such pair are not chosen.

    Raises
    ------
    MaskError
        A number or a block that is none.
    """
    mass, size = check_mass("mass", mass), check_block(block)
    similarity, causal = check_number("similarity", similarity, -1, 1), check_flag("causal", causal)
    text = f"sparge(mass={mass}, similarity={similarity}, block={block}, causal={causal})"
    return Rule(_Pooled(mass, similarity, size, causal), size, causal_mask() if causal else None, text)


@dataclass(frozen=True)
class _Pooled:
    """The rule's function, with its arguments."""

    mass: float
    similarity: float
    block: tuple[int, int]
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # Of NaN, and of zeros, False.
        queries, keys = (alike(x, n) > self.similarity for x, n in zip((q, k), self.block))
        keys = keys.repeat_interleave(q.shape[1] // k.shape[1], 1).unsqueeze(2)
        scores = pooled_scores(q, k, self.block, self.causal).masked_fill(~keys, -torch.inf)
        none = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(none, 0).softmax(-1)
        kept = (within_mass(weights, self.mass) & ~none) | ~keys | ~queries.unsqueeze(3)
        return kept & reachable(q.shape[2], k.shape[2], self.block, q.device) if self.causal else kept


def alike(x: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 (B, H, blocks): the mean cosine of all pairs of tokens of each block of x (B, H, S, D).

    The mean of all products of unit vectors is the square of their mean.  NaN where a token is 0.
    """
    x = x.float()
    return block_means(x / x.norm(dim=-1, keepdim=True), size).square().sum(-1)
