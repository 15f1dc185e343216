"""MInference's vertical-slash attention: its prediction, its lists of blocks and columns, and its Triton kernel.

The package computes one head at a time, pads and copies what needs no padding, and repeats shared keys.  Here all heads
are one call of the same kernels, without copies: heads that share keys are a batch, and their keys an expanded view.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 64  # of the kernel, both ways
LAST = 64  # queries whose weights are looked at


@dataclass
class Lists:
    """What the kernel reads: of each (key head, head of its group, block of queries) so many blocks and columns.

    Blocks are 64 keys from a number on, of which j <= i count; columns are keys before the block of queries.
    """

    block_count: torch.Tensor
    block_offset: torch.Tensor
    column_count: torch.Tensor
    column_index: torch.Tensor


class VerticalSlash:
    """The attention of q (1, H, S, D), k and v (1, Hkv, S, D), S a multiple of 64, of so many columns and diagonals.

    The first `sinks` columns and the nearest `window` diagonals are among them.
    """

    def __init__(self, q, k, v, columns: int, diagonals: int, sinks: int, window: int):
        if q.shape[2] % BLOCK:
            raise RuntimeError(f"length {q.shape[2]} is no multiple of {BLOCK}")
        from minference.ops import pit_sparse_flash_attention_v2 as package

        self.package, self.length, self.scale = package, q.shape[2], q.shape[3] ** -0.5
        self.columns, self.diagonals, self.sinks, self.window = columns, diagonals, sinks, window
        kv_heads = k.shape[1]
        self.q = q[0].unflatten(0, (kv_heads, -1))  # (Hkv, group, S, D)
        self.k, self.v = (x[0, :, None].expand_as(self.q) for x in (k, v))
        self.lengths = torch.full((kv_heads,), self.length, dtype=torch.int32, device=q.device)

    def __call__(self) -> torch.Tensor:
        lists = self.lists()
        out = self.package._triton_mixed_sparse_attention(
            self.q, self.k, self.v, self.lengths, *vars(lists).values(), self.scale, BLOCK, BLOCK
        )
        return out.flatten(0, 1)[None]

    def lists(self) -> Lists:
        """The prediction, and its indices as the kernel wants them."""
        columns, distances = (x.to(torch.int32) for x in self.predicted())
        columns, distances = columns.sort(-1).values, distances.sort(-1, descending=True).values
        convert = self.package.convert_vertical_slash_indexes
        return Lists(*convert(self.lengths, columns, distances, self.length, BLOCK, BLOCK))

    def predicted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns and the distances i - j, (Hkv, group, number), with the largest weights of the last queries."""
        last = min(LAST, self.length)
        queries = self.q[:, :, -last:].flatten(1, 2)
        # Scores are of half precision, weights of single, as in the package.
        scores = (queries @ self.k[:, 0].mT * self.scale).unflatten(1, (-1, last))
        after = torch.ones(last, last, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., -last:].masked_fill_(after, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32)
        by_column = weights.sum(-2)
        by_column[..., : self.sinks] = float("inf")
        by_distance = self._diagonals(weights)
        by_distance[..., : self.window] = float("inf")
        count = min(self.columns, self.length), min(self.diagonals, self.length)
        return tuple(x.topk(n, dim=-1).indices for x, n in zip((by_column, by_distance), count, strict=True))

    def _diagonals(self, weights: torch.Tensor) -> torch.Tensor:
        """The sums by distance, (Hkv, group, S), of weights (Hkv, group, last, S): the columns of a skewed view."""
        last = weights.shape[2]
        wide = F.pad(weights, (last, last))
        *stack, row, one = wide.stride()
        size = (*weights.shape[:2], last, self.length + last)
        return wide.as_strided(size, (*stack, row + one, one)).sum(-2)[..., 1 : self.length + 1].flip(-1)

    def keep(self, lists: Lists, heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What the kernel keeps of these rows in these heads, boolean (heads, rows, S)."""
        key = torch.arange(self.length, device=rows.device)
        at = heads[:, None], (rows // BLOCK)[None]
        block_count, block_offset, column_count, column_index = (x.flatten(0, 1)[at] for x in vars(lists).values())
        kept = torch.zeros(len(heads), len(rows), self.length + BLOCK, dtype=torch.bool, device=rows.device)
        for n in range(int(block_count.max())):
            first = block_offset[..., n, None]
            kept[..., : self.length] |= (n < block_count[..., None]) & (key >= first) & (key < first + BLOCK)
        kept[..., : self.length] &= key <= rows[:, None]
        listed = torch.arange(column_index.shape[-1], device=rows.device) < column_count[..., None]
        # What is not listed goes behind the keys.
        kept.scatter_(-1, torch.where(listed, column_index, self.length).long(), True)
        return kept[..., : self.length]
