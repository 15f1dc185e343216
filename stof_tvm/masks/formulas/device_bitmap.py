"""Bitmaps of elements that were computed on a GPU: an eighth of the bytes that booleans have cross the bus."""

import numpy as np
import torch

from tir_kernels.masks.bitmap import TILE


def packed(kept: torch.Tensor) -> np.ndarray:
    """`pack_bitmap` of a boolean tensor (n, block_m, block_n) on any device: uint64 (n, tiles)."""
    n, block_m, block_n = kept.shape
    eights = kept.reshape(n, block_m // TILE, TILE, block_n // TILE, TILE)
    bit = 1 << torch.arange(TILE, device=kept.device)
    octets = (eights * bit.to(torch.uint8)).sum(-1, dtype=torch.uint8).permute(0, 3, 1, 2)
    words = octets.contiguous().cpu().numpy().view("<u8")
    return words.reshape(n, (block_m // TILE) * (block_n // TILE)).astype(np.uint64, copy=False)
