"""A mask in the forms that attention templates need for one problem: stored in blocks of any size, or counted."""

from functools import cached_property
from typing import Protocol

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_counts import FINEST, FineMask
from tir_kernels.masks.block_sparse import BlockSparseMask


class MaskLike(Protocol):
    """What the choice of a kernel needs of a mask: storage, parts within and beyond a distance |i - j|, and a repr.

    Equal masks compare equal and have equal hashes.
    """

    def compile(self, q_len: int, kv_len: int, block: tuple[int, int], token_stride: int = 1) -> BlockSparseMask:
        """The storage for these lengths, in blocks of `block` = (height, width); MaskError where it does not fit."""
        ...

    def split(self, distance: int) -> "tuple[MaskLike, MaskLike]":
        """Two masks: what this mask keeps with |i - j| <= distance, and what it keeps beyond."""
        ...


class MaskForms:
    """A mask for one problem, in blocks of tokens that are `token_stride` apart; each form is computed once.

    A mask of None keeps everything.  Asking for a form raises MaskError if the mask does not fit the problem's batch
    and heads or keeps nothing.
    """

    def __init__(self, problem: AttentionProblem, mask: MaskLike | None = None, token_stride: int = 1):
        self.problem, self.mask, self.token_stride = problem, mask, token_stride
        self._stored: dict[tuple[int, int], BlockSparseMask] = {}

    def stored(self, block: tuple[int, int]) -> BlockSparseMask:
        """The storage in blocks of (height, width)."""
        if block not in self._stored:
            self._stored[block] = compile_mask(self.mask, self.problem, block, self.token_stride)
        return self._stored[block]

    @cached_property
    def fine(self) -> FineMask:
        """The mask in its finest blocks, from which the blocks of every size are counted."""
        return FineMask(self.stored(FINEST))


def compile_mask(
    mask: MaskLike | None, problem: AttentionProblem, block: tuple[int, int], token_stride: int = 1
) -> BlockSparseMask:
    """The mask's storage for a problem; MaskError if the mask does not fit its batch and heads or keeps nothing."""
    if mask is None:
        return BlockSparseMask.keep_all(problem.mask_rows, problem.kv_len, block)
    compiled = mask.compile(problem.mask_rows, problem.kv_len, block, token_stride)
    compiled.head_map(problem.batch, problem.q_heads)
    if compiled.is_empty:
        raise MaskError(f"the mask {mask!r} keeps nothing at ({problem.mask_rows}, {problem.kv_len})")
    return compiled
