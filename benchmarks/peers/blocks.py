"""What a mask keeps in each block, and lists of blocks, as several systems take them."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from benchmarks.peers.patterns import Pattern


def kept_in_blocks(chunks: Iterable[torch.Tensor], block: tuple[int, int]) -> torch.Tensor:
    """How many pairs of each block are kept, integers (rows, columns) of blocks; the lengths may cut the last ones.

    `chunks` are a mask's rows, boolean, in order; each but the last is a multiple of the block's height.
    """
    height, width = block
    counts = []
    for some in chunks:
        padded = F.pad(some, (0, -some.shape[1] % width, 0, -some.shape[0] % height))
        counts += [row.view(height, -1, width).sum((0, 2)) for row in padded.split(height)]
    return torch.stack(counts)


def block_lists(listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts (1, 1, rows) and columns (1, 1, rows, columns), listed ones first and ascending, both int32."""
    counts = listed.sum(dim=1, dtype=torch.int32)
    order = torch.argsort((~listed).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return counts[None, None], order[None, None].contiguous()


def lists_of_heads(listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of (B, H, rows, columns): counts (B, H, rows), and as many columns as the longest list has."""
    counts = listed.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort((~listed).to(torch.int8), dim=-1, stable=True)
    return counts, order[..., : int(counts.max())].to(torch.int32).contiguous()


def whole_blocks(pattern: Pattern, sides: Iterable[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The first of these sides whose blocks a mask keeps whole or not at all, counts and columns of its lists.

    Counts (1, 1, rows) and columns (1, 1, rows, most) are int32.  RuntimeError where no side fits, or a row keeps
    nothing: kernels take that for granted.
    """
    sides = tuple(sides)
    for side in sides:
        kept = kept_in_blocks(pattern.chunks(), (side, side))
        full = kept == side * side
        if bool((full | (kept == 0)).all()):
            counts, columns = lists_of_heads(full[None, None])
            if int(counts.min()) == 0:
                raise RuntimeError("rows that keep nothing are not measured")
            return side, counts, columns
    raise RuntimeError(f"mask {pattern.name!r} is not of whole blocks of {' or '.join(map(str, sides))}")
