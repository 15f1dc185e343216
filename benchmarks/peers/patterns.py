"""What each mask name keeps: a formula that runs anywhere, the same mask of this project's library, and the tensor.

The formulas are written apart from the library, so that every system is given the same boolean mask and the library's
is checked against it.  Widths are the square root of the length unless the name ends in one ("sliding_window-32").
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

BLOCK = 64  # side of BigBird's random blocks and of the decoding masks' key blocks
FILL = 0.1
DILATION = 2
# Shares of eight documents packed one after another; they sum to 1 and no boundary is a multiple of a block.
DOCUMENTS = (0.12, 0.05, 0.20, 0.08, 0.17, 0.10, 0.15, 0.13)
CHUNK_ELEMENTS = 1 << 26


class Pattern:
    """The mask of one name at given lengths.

    `keep(i, j)` takes broadcasting integer tensors of rows and columns on `device` and returns booleans.
    """

    def __init__(self, name: str, q_len: int, kv_len: int, device: str = "cpu"):
        self.name, self.q_len, self.kv_len, self.device = name, q_len, kv_len, device
        self.base, _, given = name.partition("-")
        self.argument = float(given) if given else None
        self.keep = self._formula()

    @property
    def width(self) -> int:
        """Half width of windows, number of global tokens, stride."""
        return int(self.argument) if self.argument else math.isqrt(self.kv_len)

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """Boolean (q_len, kv_len) on the device."""
        out = torch.empty((self.q_len, self.kv_len), dtype=torch.bool, device=self.device)
        j = torch.arange(self.kv_len, device=self.device)[None, :]
        rows = max(1, CHUNK_ELEMENTS // self.kv_len)
        for first in range(0, self.q_len, rows):
            i = torch.arange(first, min(first + rows, self.q_len), device=self.device)[:, None]
            out[first : first + rows] = self.keep(i, j)
        return out

    @functools.cached_property
    def density(self) -> float:
        return int(torch.count_nonzero(self.dense)) / (self.q_len * self.kv_len)

    @functools.cached_property
    def used_keys(self) -> float:
        """Share of the keys that any row keeps."""
        return float(self.dense.any(dim=0).double().mean())

    def stof_mask(self):
        """The mask as a user of this project writes it; None keeps everything."""
        from stof_tvm import masks

        w = self.width
        if self.base == "none":
            return None
        if self.base == "causal":
            return masks.causal()
        if self.base == "sliding_window":
            return masks.sliding_window(w)
        if self.base == "longformer":
            return masks.longformer(w, w)
        if self.base == "bigbird":
            return masks.longformer(w, w) | masks.block_sparse(self._random_blocks(FILL), BLOCK)
        if self.base == "dilated_window":
            return masks.dilated_window(w, DILATION)
        if self.base == "strided":
            return masks.strided(w)
        if self.base == "document":
            return masks.document(np.diff(self._document_bounds()).tolist())
        if self.base == "random_blocks":
            return masks.block_sparse(self._random_keys(), (1, BLOCK))
        if self.base == "full_blocks":
            return masks.block_sparse(self._random_blocks(FILL), BLOCK)
        return masks.from_tensor(self.dense.cpu())

    def _formula(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        w, dilation = self.width, DILATION

        def window(i, j):
            return (i - j <= w) & (j - i <= w)

        def longformer(i, j):
            return window(i, j) | (i < w) | (j < w)

        if self.base == "none":
            return lambda i, j: (i >= 0) & (j >= 0)
        if self.base == "causal":
            return lambda i, j: i >= j
        if self.base == "sliding_window":
            return window
        if self.base == "longformer":
            return longformer
        if self.base == "dilated_window":
            return lambda i, j: (i - j <= w * dilation) & (j - i <= w * dilation) & (i % dilation == j % dilation)
        if self.base == "strided":
            return lambda i, j: (i >= j) & ((i - j <= w) | (i % w == j % w))
        if self.base == "document":
            bounds = self._document_bounds()
            number = torch.from_numpy(np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds)))
            number = number.to(self.device)
            return lambda i, j: number[i] == number[j]
        if self.base == "random_blocks":
            kept = torch.from_numpy(self._random_keys()[0]).to(self.device)
            return lambda i, j: kept[j // BLOCK] & (i >= 0)
        if self.base in ("bigbird", "full_blocks", "part_blocks"):
            blocks = torch.from_numpy(self._random_blocks(FILL)).to(self.device)
            if self.base == "bigbird":
                return lambda i, j: longformer(i, j) | blocks[i // BLOCK, j // BLOCK]
            if self.base == "full_blocks":
                return lambda i, j: blocks[i // BLOCK, j // BLOCK]
            # One element of each 16 × 16 square is dropped: no block of any size is full.
            return lambda i, j: blocks[i // BLOCK, j // BLOCK] & ((i % 16 != 5) | (j % 16 != 3))
        raise ValueError(f"mask {self.name!r} is not one that the benchmark knows")

    def _random_blocks(self, fill: float) -> np.ndarray:
        shape = -(-self.q_len // BLOCK), -(-self.kv_len // BLOCK)
        return np.random.default_rng(0).random(shape) < fill

    def _random_keys(self) -> np.ndarray:
        """Boolean (1, blocks): a share `argument` of the key blocks, rounded, at least one."""
        blocks = -(-self.kv_len // BLOCK)
        kept = np.random.default_rng(0).permutation(blocks)[: max(1, round(self.argument * blocks))]
        return np.isin(np.arange(blocks), kept)[None]

    def _document_bounds(self) -> np.ndarray:
        return np.round(np.cumsum((0, *DOCUMENTS)) * self.kv_len).astype(np.int64)


@functools.cache
def shared_pattern(name: str, q_len: int, kv_len: int, device: str) -> Pattern:
    """One Pattern, and so one dense tensor, for all cases and systems of a process."""
    return Pattern(name, q_len, kv_len, device)
