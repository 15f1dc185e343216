"""What is measured: attentions of video models, a block of Wan, and a million tokens; and the tiles' formula."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILES, BLOCK, MILLION = "tiles", "block", "million"
OURS = "stof"
WIDE, STATIC = "stof-blocks-256", "stof-static"
FASTVIDEO_STA, FASTVIDEO_BLOCKS = "fastvideo-sta", "fastvideo-blocks"
SYSTEMS = {
    TILES: (OURS, "flex", "flex-fa4", "cudnn-flex", FASTVIDEO_STA, FASTVIDEO_BLOCKS),
    BLOCK: (OURS, "compile-flex"),
    MILLION: (OURS, WIDE, STATIC),
}
# What PyTorch alone is enough for; the lists of a static mask of a million tokens take minutes, and 14 GB, to make.
DEFAULT = (OURS, WIDE, "flex", "compile-flex")
ALL = tuple(dict.fromkeys(name for names in SYSTEMS.values() for name in names))
TILE, WINDOW = (6, 8, 8), (18, 24, 24)  # tokens, those of Sliding Tile Attention's paper
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Case:
    """Sizes in bfloat16, batch 1.  A block's are those of its self-attention; `layers` of them are one model.

    A canvas (T, H, W) of no size is no canvas: that case has `length` tokens in a row.
    """

    kind: str
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    canvas: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    layers: int = 0

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    @classmethod
    def from_row(cls, row: dict) -> "Case":
        """The case of a row, whose tuples JSON has made lists."""
        return cls(**{key: tuple(x) if isinstance(x, list) else x for key, x in row["case"].items()})

    def tiles(self, device: str) -> "Tiles":
        """The mask's formula."""
        return Tiles(self.canvas, self.tile, self.window, device)


def on_canvas(kind: str, name: str, heads: int, canvas, tile=TILE, window=WINDOW, dim: int = 128, layers: int = 0):
    """A case of sliding tiles."""
    length = canvas[0] * canvas[1] * canvas[2]
    return Case(kind, name, heads, heads, dim, length, canvas, tile, window, layers)


# Tiles divide HunyuanVideo's canvas.  Wan's have short tiles at the ends of all axes but the last; the same window of
# 3 × 3 × 3 tiles keeps 12 % there instead of 9 %, and 27 % of the smaller canvas.
CASES = (
    on_canvas(TILES, "HunyuanVideo", 24, (30, 48, 80)),
    on_canvas(TILES, "Wan-14B-720p", 40, (21, 45, 80)),
    on_canvas(BLOCK, "Wan-1.3B-480p", 12, (21, 30, 52), layers=1),
    Case(MILLION, "vertical_slash", 4, 1, 128, 1 << 20),
)
TINY = (
    on_canvas(TILES, "HunyuanVideo", 2, (4, 8, 12), (2, 4, 4), (2, 8, 4), 32),
    on_canvas(TILES, "Wan-14B-720p", 2, (3, 5, 8), (2, 4, 4), (2, 4, 4), 32),
    on_canvas(BLOCK, "Wan-1.3B-480p", 2, (3, 5, 6), (2, 2, 3), (2, 2, 3), 16, 1),
    Case(MILLION, "vertical_slash", 4, 1, 32, 1024),
)


class Tiles:
    """Sliding tiles of tokens tile by tile, large tiles first, written apart from this project's mask of that name.

    `keep(i, j)` takes broadcasting integer tensors and returns booleans; a query keeps on each axis the tiles of an
    interval, and so the kept share is the product of those of the axes.
    """

    def __init__(self, canvas, tile, window, device: str):
        self.q_len = self.kv_len = canvas[0] * canvas[1] * canvas[2]
        self.device = device
        grid = torch.meshgrid(*(torch.arange(n) // step for n, step in zip(canvas, tile, strict=True)), indexing="ij")
        counts = [-(-n // step) for n, step in zip(canvas, tile, strict=True)]
        number = (grid[0] * counts[1] + grid[1]) * counts[2] + grid[2]
        number = number.flatten()  # the tile of each token, row by row
        sizes = number.bincount()
        place = sizes.argsort(descending=True, stable=True).argsort()  # of each tile among all
        self.order = place[number].argsort(stable=True)  # row-major numbers of the tokens
        self.number = number[self.order].int().to(device)
        widths = [min(-(-reach // step), count) for reach, step, count in zip(window, tile, counts, strict=True)]
        near = []
        for count, width in zip(counts, widths, strict=True):
            first = (torch.arange(count) - width // 2).clamp(0, count - width)[:, None]
            near.append((first <= torch.arange(count)) & (torch.arange(count) < first + width))
        pairs = near[0][:, None, None, :, None, None] & near[1][:, None, None, :, None]
        pairs = pairs & near[2][:, None, None, :]
        self.near = pairs.reshape(len(sizes), -1).to(device)

    def keep(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.near[self.number[i], self.number[j]]

    def rows(self, i: torch.Tensor) -> torch.Tensor:
        """Boolean (len(i), kv_len): what these rows keep."""
        return self.keep(i[:, None], torch.arange(self.kv_len, device=self.device)[None, :])

    def chunks(self) -> Iterator[torch.Tensor]:
        """All rows, some at a time, a multiple of 128 unless they are the last."""
        step = max(1, CHUNK_ELEMENTS // self.kv_len // 128) * 128
        for some in torch.arange(self.q_len, device=self.device).split(step):
            yield self.rows(some)

    @functools.cached_property
    def kept(self) -> int:
        """How many pairs are kept."""
        sizes = torch.bincount(self.number).double()
        return round(float(sizes @ self.near.double() @ sizes))
