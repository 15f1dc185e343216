"""The blocks along one side of a mask."""

from dataclasses import dataclass, replace

import numpy as np

from tir_kernels.masks.token_blocks import first_tokens


@dataclass(frozen=True, eq=False)
class Side:
    """Blocks along one length: the first and the last token of each, whose tokens are `stride` apart.

    `size` is the number of tokens of a whole block, `count` how many of them lie within the length.  A block past the
    length has a count of 0; its `first` and `last` are one token, so that patterns can answer.
    """

    first: np.ndarray
    last: np.ndarray
    count: np.ndarray
    size: int
    stride: int

    @staticmethod
    def of(length: int, block: int, stride: int) -> "Side":
        """All blocks of a length."""
        first = first_tokens(length, block, stride)
        count = np.clip(-(-(length - first) // stride), 0, block)
        first = np.minimum(first, length - 1)
        return Side(first, first + np.maximum(count - 1, 0) * stride, count, block, stride)

    def __len__(self) -> int:
        return len(self.first)

    def part(self, some: slice | np.ndarray) -> "Side":
        """Some of the blocks."""
        return replace(self, first=self.first[some], last=self.last[some], count=self.count[some])

    def cut(self, pieces: int) -> "Side":
        """Each block cut into so many."""
        before = np.arange(pieces) * (self.size // pieces)
        count = np.clip(self.count[:, None] - before, 0, self.size // pieces).reshape(-1)
        first = np.minimum(self.first[:, None] + before * self.stride, self.last[:, None]).reshape(-1)
        return Side(first, first + np.maximum(count - 1, 0) * self.stride, count, self.size // pieces, self.stride)

    def joined(self, blocks: int) -> "Side":
        """So many neighbours each as one block, of consecutive tokens; the last one may have fewer."""
        assert self.stride == 1
        starts = np.arange(0, len(self), blocks)
        last = self.last[np.minimum(starts + blocks, len(self)) - 1]
        return Side(self.first[starts], last, np.add.reduceat(self.count, starts), self.size * blocks, 1)

    @property
    def is_ragged(self) -> np.ndarray:
        """Boolean, for each block: whether some of its tokens are past the length."""
        return self.count < self.size

    def tokens(self, which) -> np.ndarray:
        """(n, size): the tokens of some blocks; past the end of a block its last token again."""
        return np.minimum(self.first[which, None] + np.arange(self.size) * self.stride, self.last[which, None])
