"""Blocks that a rule may as well have chosen: those that a move of its numbers by what is no error of theirs turns.

What the rule's function rounds, and which of equal scores it takes, is chosen anew at random (roundings.py): so weights
turn that have underflowed, or that are equal because scores are tiny.  q and k are moved as well, by turns not at all,
each element by itself, and the tokens of a block alike: extremes of equal blocks tie unless tokens move apart, but then
those of a short block are never the largest.

Such moves leave most of many equal blocks as they were.  Of t blocks of a row that n moves have turned on, a choice at
random among equal ones has less than t / n others on average, and the same holds of those turned off.  So in each row
one block more is taken for a near tie for `EACH` that were turned the same way.  Rows answer for themselves: what
ties in one excuses nothing in another.
"""

import math

import torch

from relax_passes.attention.site_names import named
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.rules.roundings import OtherRoundings
from tir_kernels.errors import VerificationError

MOVES = 96  # the most; a few are enough but for blocks that are no near ties, or one among very many
EACH = 4


def near_ties(path: str, rule: Rule, found: torch.Tensor, q: torch.Tensor, k: torch.Tensor, close: float) -> int:
    """How many blocks of a map differ from those of the rule for q and k; VerificationError where that is no near tie.

    Parameters
    ----------
    path : str
        The attention, for the message.
    rule : Rule
    found : Tensor
        The block map to judge, boolean and on the CPU.
    q, k : Tensor
        As `rule.block_map` takes them.
    close : float
        The difference of q and k, over the largest value of a row, that is no error of theirs.
    """
    own = rule.block_map(q, k).cpu()
    apart = own != found
    if not apart.any():
        return 0
    turned = torch.zeros_like(own)
    for seed in range(MOVES):
        generator = torch.Generator().manual_seed(seed)
        moved = [q, k]
        if sizes := ((1, 1), rule.block, None)[seed % 3]:
            moved = [_moved(x, generator, close, size) for x, size in zip(moved, sizes)]
        with OtherRoundings(seed):
            other = rule.block_map(*moved)
        turned |= other.cpu() != own
        if all(_are_explained(apart & side, turned & side) for side in (own, ~own)):
            return int(apart.sum())
    raise VerificationError(
        f"attention {named(path)}: {int(apart.sum())} of {own.numel()} blocks that the engine found are not those that "
        f"{rule!r} keeps in PyTorch on the example inputs; roundings turn {int((apart & turned).sum())} of them. "
        "verify=False builds it all the same"
    )


def _are_explained(apart: torch.Tensor, turned: torch.Tensor) -> bool:
    """Whether in each row the blocks that are apart were turned, but for one for `EACH` that were."""
    return bool(((apart & ~turned).sum(-1) * EACH <= turned.sum(-1)).all())


def _moved(x: torch.Tensor, generator: torch.Generator, close: float, size: int) -> torch.Tensor:
    """x (B, H, S, D), moved at random by up to what it may differ by: `close` times its row's largest element.

    `size` tokens move alike, and by less, so that their mean moves no further than if each moved by itself.  Scores of
    a row of zeros are all equal; it moves as if its largest one were 1.
    """
    batch, heads, length, channels = x.shape
    moves = torch.rand(batch, heads, -(-length // size), channels, generator=generator) * 2 - 1
    moves = moves.repeat_interleave(size, 2)[:, :, :length].to(x.device, x.dtype)
    largest = x.abs().amax(-1, keepdim=True)
    return x + moves * (close / math.sqrt(size) * torch.where(largest == 0, 1, largest))
