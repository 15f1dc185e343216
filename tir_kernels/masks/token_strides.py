"""The search for a token stride: a common divisor of the distances that a mask keeps.

A dilated window keeps distances 0, d, 2d …; a strided mask keeps multiples of its stride, and a window besides.  In
blocks of consecutive tokens nearly everything that a kernel computes for such a mask is masked.  Blocks of every
stride-th token are far fewer.
"""

from typing import NamedTuple

import numpy as np

from tir_kernels.masks.bitmap import unpack_bitmap
from tir_kernels.masks.block_sparse import BlockSparseMask

WASTE = 0.5  # a mask is examined if at least this share of the elements in listed blocks is masked
SAMPLED_BLOCK_ROWS = 12
LEAST_SHARE = 0.1  # of the kept elements: at least so many must lie beyond the near distances


class TokenStride(NamedTuple):
    """Kept distances |i - j| beyond `near` are multiples of `stride`; near = 0 where all are."""

    near: int
    stride: int


def find_token_stride(mask: BlockSparseMask) -> TokenStride | None:
    """The largest stride that leaves the fewest near distances in a sample of block rows; None if there is none.

    Rows that were not sampled may differ, so the caller must compare the predicted time with that of the usual order.
    """
    if mask.is_empty or mask.density > (1 - WASTE) * mask.block_density:
        return None
    kept = _kept_distances(mask)
    distances = np.flatnonzero(kept)[::-1]  # largest first
    distances = distances[distances > 0]
    if len(distances) < 2:
        return None
    divisor = np.gcd.accumulate(distances)
    last = int(np.flatnonzero(divisor > 1)[-1]) if divisor[0] > 1 else -1
    if last < 0:
        return None
    near = int(distances[last + 1]) if last + 1 < len(distances) else 0
    beyond = kept[near + 1 :].sum() if near else kept.sum()
    stride = int(divisor[last])
    # More than one distance must be a multiple of the stride: a single distance always has divisors.
    if last == 0 or beyond < LEAST_SHARE * kept.sum() or stride > min(mask.q_len, mask.kv_len) // 2:
        return None
    return TokenStride(near, stride)


def _kept_distances(mask: BlockSparseMask) -> np.ndarray:
    """int64: how many of the sampled rows' kept elements lie at each distance |i - j|."""
    counts = np.zeros(max(mask.q_len, mask.kv_len) + mask.block_m + mask.block_n, np.int64)
    rows = np.linspace(0, mask.n_patterns * mask.n_block_rows - 1, SAMPLED_BLOCK_ROWS).astype(int)
    offsets = (np.arange(mask.block_n) - np.arange(mask.block_m)[:, None]).astype(np.int32)
    for r in np.unique(rows):
        listed = slice(mask.load_row_ptr[r], mask.load_row_ptr[r + 1])
        starts = mask.load_col_idx[listed] * mask.block_n - r % mask.n_block_rows * mask.block_m
        parts = mask.load_part_idx[listed]
        whole, part = (abs(starts[of][:, None, None] + offsets) for of in (parts < 0, parts >= 0))
        part = part[unpack_bitmap(mask.bitmap[parts[parts >= 0]], mask.block_m, mask.block_n)]
        for distances in (whole.reshape(-1), part):
            counts += np.bincount(distances, minlength=len(counts))
    return counts
