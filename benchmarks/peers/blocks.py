"""What a mask keeps in each block, and lists of blocks, as several systems take them."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F


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
