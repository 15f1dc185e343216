"""DSA's predictor: scores of few dimensions and bits."""

import math
from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_flag, check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.runtime.selection import block_means, block_weights, check_mass, largest, most_mass, reachable
from stof_tvm.masks.windows import causal as causal_mask
from tir_kernels.errors import MaskError


def low_rank(
    mass: float = 0.9,
    k: int | None = None,
    rank: int = 32,
    bits: int = 4,
    stride: int = 16,
    seed: int = 0,
    block=64,
    causal: bool = True,
) -> Rule:
    """A rule that keeps the blocks with most of the weights of approximate scores.

    Queries and keys are projected at random to `rank` dimensions and rounded to integers of `bits`, each token by a
    scale of its own (DSA, Liu et al., 2021, whose projection is followed by weights that are trained; here are none).
    The softmax of their products, summed over a block, is the block's weight.

    Parameters
    ----------
    mass : float
        Share of the weight that each block of queries keeps, by the fewest blocks; above 0 and at most 1.
    k : int, optional
        Keep that many blocks for each block of queries instead, at least 1.
    rank, bits : int
        Dimensions of the scores, at least 1, and bits of their integers, 2 to 8.
    stride : int
        Tokens whose mean is projected, which divides the block's height and width; 1 predicts every pair, as in the
        paper.
    seed : int
        Of the projection.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32.
    causal : bool
        Keep j <= i only.

    Raises
    ------
    MaskError
        A number, a stride or a block that is none.
    """
    mass, size = check_mass("mass", mass), check_block(block)
    k = None if k is None else check_int("k", k, least=1)
    rank, stride = check_int("rank", rank, least=1), check_int("stride", stride, least=1)
    bits, seed = check_int("bits", bits, least=2, largest=8), check_int("seed", seed, largest=2**31 - 1)
    if size[0] % stride or size[1] % stride:
        raise MaskError(f"stride={stride} must divide the height and width of block={block}")
    causal = check_flag("causal", causal)
    kept = f"mass={mass}" if k is None else f"k={k}"
    text = f"low_rank({kept}, rank={rank}, bits={bits}, stride={stride}, seed={seed}, block={block}, causal={causal})"
    function = _Projected(mass, k, rank, bits, stride, seed, size, causal)
    return Rule(function, size, causal_mask() if causal else None, text)


@dataclass(frozen=True)
class _Projected:
    """The rule's function, with its arguments."""

    mass: float
    k: int | None
    rank: int
    bits: int
    stride: int
    seed: int
    block: tuple[int, int]
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        few = projection(q.shape[3], self.rank, self.seed, q.device)
        rows, columns = (rounded(block_means(x, self.stride) @ few, self.bits) for x in (q, k))
        scores = grouped_product(rows, columns.transpose(-1, -2)) * default_scale(q)
        each = self.block[0] // self.stride, self.block[1] // self.stride
        weights = block_weights(scores, each, self.causal)
        if self.k is None:
            return most_mass(weights, self.mass)
        if self.causal:
            weights = weights.masked_fill(~reachable(q.shape[2], k.shape[2], self.block, q.device), -torch.inf)
        return largest(weights, self.k)


def projection(size: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """Float32 (size, rank): √(3 / rank) times -1, 0 or 1, which two thirds of the entries and one sixth each are.

    Products of what it projects are those of the vectors on average.  Entries are hashed from their places where they
    are needed: nothing is copied to the device, and a seed gives the same numbers on all.
    """
    number = torch.arange(size * rank, device=device).unflatten(0, (size, rank)) + seed * 0x9E3779B1
    number = number % 2**32
    for _ in range(2):
        number = ((number ^ (number >> 16)) * 0x45D9F3B) % 2**32
    number = (number ^ (number >> 16)) % 6
    return ((number == 0).float() - (number == 1).float()) * math.sqrt(3 / rank)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Like x (..., n), float32: its rows rounded to multiples of one scale each, integers of `bits` with a sign."""
    scale = (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round() * scale
