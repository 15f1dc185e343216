"""FastVideo's kernels for Hopper on sliding tiles: its own of that name, and its lists of blocks of 64 tokens.

Both want tokens in an order and a padding of their own, which a model would give them once: they are not timed.
"""

import torch
import torch.nn.functional as F

from benchmarks.peers.blocks import lists_of_heads
from benchmarks.peers.fastvideo import BLOCK, block_sparse, operators, version
from benchmarks.peers.systems import FASTVIDEO_DIMS
from benchmarks.video.cases import FASTVIDEO_BLOCKS, FASTVIDEO_STA, TILE, Case, Tiles

# The canvas in tiles and the window in tiles for which this benchmark has a case and the wheel a kernel, and the number
# by which its interface knows the canvas.
CANVAS, WINDOW, NUMBER = (5, 6, 10), (3, 3, 3), 1
TEXT = 384  # tokens behind those of the video, which that kernel always reads, and masks where they are no text


def has_kernel(case: Case, system: str) -> bool:
    """Whether the wheel has a kernel for the case; True for systems that are not of the wheel."""
    if system == FASTVIDEO_BLOCKS:
        return case.head_dim in FASTVIDEO_DIMS
    if system != FASTVIDEO_STA:
        return True
    canvas, window = (tuple(a / b for a, b in zip(sizes, case.tile)) for sizes in (case.canvas, case.window))
    return (case.tile, canvas, window, case.head_dim) == (TILE, CANVAS, WINDOW, 128)


def prepare(case: Case, system: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The call, what the mask keeps of some rows, facts of the row, and from the call's result to (B, H, S, D)."""
    tiles = case.tiles(q.device.type)
    density = tiles.kept / case.length**2
    if system == FASTVIDEO_STA:
        call, scheduled = _sliding_tiles(case, q, k, v), density + TEXT / case.length
        variant, restore = f"fastvideo {version()}, of {TEXT} tokens of text none", lambda out: out[:, :, : case.length]
    else:
        padded = PaddedTiles(tiles)
        counts, columns = lists_of_heads(padded.listed.expand(1, case.heads, -1, -1))
        attend = block_sparse(counts, columns, padded.sizes)
        given = [padded.pad(x) for x in (q, k, v)]
        call, scheduled = lambda: attend(*given), padded.pairs / case.length**2
        variant = f"fastvideo {version()} {BLOCK}x{BLOCK}, {padded.length} tokens with padding"
        restore = lambda out: out[:, :, padded.place]
    return call, tiles.rows, {"variant": variant, "density": density, "scheduled": scheduled}, restore


def _sliding_tiles(case: Case, q, k, v):
    """Without text, the wheel has this canvas only as the video's part of a sequence that text follows."""
    kernels, given = operators(), [F.pad(x, (0, 0, 0, TEXT)) for x in (q, k, v)]
    return lambda: kernels.sta_fwd(*given, torch.empty_like(given[0]), *WINDOW, 0, False, True, NUMBER)


class PaddedTiles:
    """Sliding tiles, each padded to whole blocks of 64 tokens, and no further: a block holds tokens of one tile.

    Attributes
    ----------
    place
        Where each token of the tiles' order goes.
    sizes
        int32 (blocks,): how many tokens of a block are there, at least one.
    listed
        Boolean (blocks of queries, blocks of keys): what the mask keeps.
    """

    def __init__(self, tiles: Tiles):
        number, tokens = torch.unique_consecutive(tiles.number.long(), return_counts=True)
        blocks = (tokens + BLOCK - 1) // BLOCK
        first, before = (x.cumsum(0) - x for x in (blocks, tokens))
        inside = torch.arange(tiles.q_len, device=tiles.device) - before.repeat_interleave(tokens)
        self.place = first.repeat_interleave(tokens) * BLOCK + inside
        tile = number.repeat_interleave(blocks)
        self.sizes = (self.place // BLOCK).bincount(minlength=len(tile)).to(torch.int32)
        self.listed = tiles.near[tile[:, None], tile]

    @property
    def length(self) -> int:
        """Tokens with padding."""
        return len(self.sizes) * BLOCK

    @property
    def pairs(self) -> int:
        """How many pairs the listed blocks have."""
        return int(self.listed.sum()) * BLOCK**2

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, H, S, D) with zeros where no token is."""
        out = x.new_zeros(*x.shape[:2], self.length, x.shape[3])
        out[:, :, self.place] = x
        return out
