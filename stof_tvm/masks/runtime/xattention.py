"""XAttention: blocks by the sums of their antidiagonals."""

from dataclasses import dataclass

import torch

from stof_tvm.masks.arguments import check_flag, check_int
from stof_tvm.masks.quality.weights import default_scale, grouped_product
from stof_tvm.masks.runtime.rule import Rule, check_block
from stof_tvm.masks.runtime.selection import block_weights, check_mass, most_mass, padded, reachable
from stof_tvm.masks.windows import causal as causal_mask
from tir_kernels.errors import MaskError


def xattention(stride: int = 16, mass: float = 0.9, block=64, causal: bool = True) -> Rule:
    """A rule that keeps the blocks with most of the weights of antidiagonals (XAttention, Xu et al., 2025).

    The score of `stride` queries and `stride` keys is the mean of their antidiagonal's products; its softmax along the
    keys, summed over a block, is the block's weight.  For each block of queries the heaviest blocks are kept that hold
    `mass` of the weight.

    Parameters
    ----------
    stride : int
        Tokens that share a score; it divides the block's height and width.
    mass : float
        Share of the weight that is kept, above 0 and at most 1.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 and 32.
    causal : bool
        Keep j <= i only; then the first block and those of the diagonal are kept first, whatever they weigh.

    Raises
    ------
    MaskError
        A stride, a mass or a block that is none.
    """
    size, stride = check_block(block), check_int("stride", stride, least=1)
    if size[0] % stride or size[1] % stride:
        raise MaskError(f"stride={stride} must divide the height and width of block={block}")
    mass, causal = check_mass("mass", mass), check_flag("causal", causal)
    text = f"xattention(stride={stride}, mass={mass}, block={block}, causal={causal})"
    return Rule(_Antidiagonals(stride, mass, size, causal), size, causal_mask() if causal else None, text)


@dataclass(frozen=True)
class _Antidiagonals:
    """The rule's function, with its arguments."""

    stride: int
    mass: float
    block: tuple[int, int]
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        stride, (height, width) = self.stride, self.block
        rows, keys = (padded(x, 0, 0, 0, -x.shape[2] % stride).unflatten(2, (-1, stride)) for x in (q, k))
        products = grouped_product(rows.flip(3).flatten(3), keys.flatten(3).transpose(-1, -2))
        each = height // stride, width // stride
        weights = block_weights(products * (default_scale(q) / stride), each, self.causal)
        if not self.causal:
            return most_mass(weights, self.mass)
        seen = reachable(q.shape[2], k.shape[2], self.block, q.device)
        first_row = torch.arange(0, q.shape[2], height, device=q.device)[:, None]
        first_key = torch.arange(0, k.shape[2], width, device=q.device)
        return most_mass(weights, self.mass, (seen & (first_key + width > first_row)) | (first_key == 0))
