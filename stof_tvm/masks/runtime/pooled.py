"""Rules by the scores of pooled blocks."""

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.runtime.selection import block_means, largest, reachable
from stof_tvm.masks.windows import causal as causal_mask


def top_blocks(k: int, block=64, causal: bool = False) -> Rule:
    """A rule that keeps, for each block of queries, the k blocks of keys whose mean has the largest products.

    The score of two blocks is the product of the mean of the queries and the mean of the keys: the fine stage of VSA
    (Zhang et al., 2025) and the block-sparse pattern of MInference (Jiang et al., 2024).

    Parameters
    ----------
    k : int
        Blocks of keys for each block of queries, at least 1.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32.
    causal : bool
        Keep j <= i only; blocks that hold no such pair are not chosen.

    Raises
    ------
    MaskError
        A number or a block that is none.
    """
    k, size = check_int("k", k, least=1), check_block(block)

    def top(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return largest(pooled_scores(queries, keys, size, causal), k)

    text = f"top_blocks({k}, block={block}" + (", causal=True)" if causal else ")")
    return Rule(top, size, causal_mask() if causal else None, text)


def pooled_scores(q: torch.Tensor, k: torch.Tensor, size: tuple[int, int], causal: bool) -> torch.Tensor:
    """Float32 (B, H, query blocks, key blocks): the scores of the blocks' means; -inf what a causal mask empties."""
    pooled = block_means(k, size[1]).transpose(-1, -2)
    scores = grouped_product(block_means(q, size[0]) * default_scale(q), pooled)
    if causal:
        seen = reachable(q.shape[2], k.shape[2], size, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores
