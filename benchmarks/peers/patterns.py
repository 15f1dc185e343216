"""What each mask name keeps: a formula that runs anywhere, the same mask of this project's library, and the tensor.

The formulas are written apart from the library, so that every system is given the same boolean mask and the library's
is checked against it.  Widths are the square root of the length unless the name ends in one ("sliding_window-32").
"""

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

BLOCK = 64  # side of BigBird's random blocks and of the decoding masks' key blocks
TILE = 128  # side of the whole blocks of "random_tiles"
FILL = 0.1
DILATION = 2
# Shares of eight documents packed one after another; they sum to 1 and no boundary is a multiple of a block.
DOCUMENTS = (0.12, 0.05, 0.20, 0.08, 0.17, 0.10, 0.15, 0.13)
# A video's canvas in tiles: 16 × 32 × 48 tokens in tiles of 4 × 8 × 8, whose queries see the tile and all next to it.
CANVAS = (4, 4, 6)
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
        """Half width of windows, keys of causal ones, number of global and of prefix tokens, stride."""
        return int(self.argument) if self.argument else math.isqrt(self.kv_len)

    @functools.cached_property
    def dense(self) -> torch.Tensor:
        """Boolean (q_len, kv_len) on the device: a byte for each pair, so not for the longest masks."""
        out = torch.empty((self.q_len, self.kv_len), dtype=torch.bool, device=self.device)
        first = 0
        for some in self.chunks():
            out[first : first + len(some)] = some
            first += len(some)
        return out

    def rows(self, i: torch.Tensor) -> torch.Tensor:
        """Boolean (len(i), kv_len): what these rows keep."""
        return self.keep(i[:, None], torch.arange(self.kv_len, device=self.device)[None, :])

    def chunks(self) -> Iterator[torch.Tensor]:
        """All rows from the first to the last, some at a time, a multiple of TILE unless they are the last."""
        for some in torch.arange(self.q_len, device=self.device).split(
            max(1, CHUNK_ELEMENTS // self.kv_len // TILE) * TILE
        ):
            yield self.rows(some)

    @property
    def density(self) -> float:
        return self._shares[0]

    @property
    def used_keys(self) -> float:
        """Share of the keys that any row keeps."""
        return self._shares[1]

    @functools.cached_property
    def _shares(self) -> tuple[float, float]:
        kept, used = 0, torch.zeros(self.kv_len, dtype=torch.bool, device=self.device)
        for some in self.chunks():
            kept += int(torch.count_nonzero(some))
            used |= some.any(dim=0)
        return kept / (self.q_len * self.kv_len), float(used.double().mean())

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
        if self.base == "causal_window":
            return masks.causal() & masks.sliding_window(w - 1)
        if self.base == "prefix":
            return masks.prefix_lm(w)
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
        if self.base == "random_tiles":
            return masks.block_sparse(self._random_tiles(), TILE)
        if self.base == "video":
            return masks.block_sparse(self._video_tiles(), self._video_tile)
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
        if self.base == "causal_window":
            return lambda i, j: (i >= j) & (i - j < w)
        if self.base == "prefix":
            return lambda i, j: (i >= j) | (j < w)
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
        if self.base == "random_tiles":
            tiles = torch.from_numpy(self._random_tiles()).to(self.device)
            return lambda i, j: tiles[i // TILE, j // TILE]
        if self.base == "video":
            return self._video_formula()
        if self.base in ("bigbird", "full_blocks", "part_blocks"):
            blocks = torch.from_numpy(self._random_blocks(FILL)).to(self.device)
            if self.base == "bigbird":
                return lambda i, j: longformer(i, j) | blocks[i // BLOCK, j // BLOCK]
            if self.base == "full_blocks":
                return lambda i, j: blocks[i // BLOCK, j // BLOCK]
            # One element of each 16 × 16 square is dropped: no block of any size is full.
            return lambda i, j: blocks[i // BLOCK, j // BLOCK] & ((i % 16 != 5) | (j % 16 != 3))
        raise ValueError(f"mask {self.name!r} is not one that the benchmark knows")

    def _video_formula(self):
        tile, (_, height, width) = self._video_tile, CANVAS

        def near(a, b):
            return (a - b <= 1) & (b - a <= 1)

        def keep(i, j):
            a, b = i // tile, j // tile
            frames = near(a // (height * width), b // (height * width))
            return frames & near(a // width % height, b // width % height) & near(a % width, b % width)

        return keep

    @property
    def _video_tile(self) -> int:
        """Tokens of a tile, which follow one another; the last tiles are short or missing at other lengths."""
        return -(-self.kv_len // math.prod(CANVAS))

    def _video_tiles(self) -> np.ndarray:
        """Boolean (tiles of queries, tiles of keys)."""
        places = np.stack(np.unravel_index(np.arange(math.prod(CANVAS)), CANVAS))
        near = (abs(places[:, :, None] - places[:, None, :]) <= 1).all(axis=0)
        return near[: -(-self.q_len // self._video_tile), : -(-self.kv_len // self._video_tile)]

    def _random_tiles(self) -> np.ndarray:
        """Boolean (tiles of queries, tiles of keys): a share `argument` of each row's, rounded, at least one."""
        shape = -(-self.q_len // TILE), -(-self.kv_len // TILE)
        kept = max(1, round(self.argument * shape[1]))
        return np.random.default_rng(0).random(shape).argsort(axis=1).argsort(axis=1) < kept

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
