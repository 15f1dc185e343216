"""What `sparse_attention` takes as a mask: a Mask, a bool tensor, a FlexAttention BlockMask or mask_mod function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from stof_tvm import masks
from stof_tvm.masks.flex import taken_directly
from stof_tvm.masks.identity import Identity
from tir_kernels.errors import MaskError


class GivenMask(NamedTuple):
    """A mask by its identity, and how to make it where nothing is known of it yet: caches hold no dense array."""

    identity: Identity | None
    make: Callable[[], masks.Mask | None]


NO_MASK = GivenMask(None, lambda: None)


def given_mask(mask, sizes: tuple[int, int, int, int]) -> GivenMask:
    """The mask of a call whose attention has `sizes` (B, H, Sq, Skv); MaskError for what is none.

    A tensor is hashed once for each of its versions, the blocks of a BlockMask are read once for each of its tensors',
    and what a function reads is read at each call.
    """
    if mask is None:
        return NO_MASK
    if isinstance(mask, torch.Tensor):
        return _of_tensor(mask, sizes)
    if isinstance(mask, BlockMask):
        mask = _of_block_mask(mask)
    elif callable(mask) and not isinstance(mask, masks.Mask | type):
        mask = taken_directly(mask, *sizes[:2])
    elif not isinstance(mask, masks.Mask):
        raise MaskError(
            f"mask must be a Mask, a bool tensor, a BlockMask or a mask_mod function, got {type(mask).__name__}"
        )
    return GivenMask(mask.identity, lambda: mask)


_tensors = WeakIdKeyDictionary()  # tensor -> (version, sizes, identity)
_block_masks = WeakIdKeyDictionary()  # BlockMask -> (its function, tensors and their versions, mask)


def _of_tensor(tensor: torch.Tensor, sizes) -> GivenMask:
    if tensor.dtype != torch.bool:
        raise MaskError(f"a mask tensor must be bool (True is kept), got {tensor.dtype}; additive scores go to bias=")
    version = None if tensor.is_inference() else tensor._version
    known = _tensors.get(tensor)
    if known is not None and version is not None and known[:2] == (version, sizes):
        return GivenMask(known[2], lambda: masks.from_tensor(_spread_lengths(tensor, sizes)))
    mask = masks.from_tensor(_spread_lengths(tensor, sizes))
    if version is not None:
        _tensors[tensor] = version, sizes, mask.identity
    return GivenMask(mask.identity, lambda: mask)


def _of_block_mask(block_mask: BlockMask) -> masks.Mask:
    partial = block_mask.kv_num_blocks, block_mask.kv_indices
    tensors = (*partial, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    parts = [x for x in tensors if x is not None]
    if any(x.is_inference() for x in parts):
        return masks.from_block_mask(block_mask)
    versions = [x._version for x in parts]
    known = _block_masks.get(block_mask)
    if known is not None:
        function, known_parts, known_versions, mask = known
        same = len(parts) == len(known_parts) and all(x is y for x, y in zip(parts, known_parts))
        if same and function is block_mask.mask_mod and versions == known_versions:
            return mask
    mask = masks.from_block_mask(block_mask)
    _block_masks[block_mask] = block_mask.mask_mod, parts, versions, mask
    return mask


def _spread_lengths(mask: torch.Tensor, sizes) -> torch.Tensor:
    """A mask broadcast along both lengths, kept at size 1 where batch or heads share it."""
    try:
        torch.broadcast_shapes(mask.shape, sizes)
        full = mask.expand(*mask.shape[:-2], *sizes[2:]) if mask.dim() >= 2 else mask.expand(sizes[2:])
        if full.dim() > 4 or any(n not in (1, t) for n, t in zip(reversed(full.shape), reversed(sizes), strict=False)):
            raise RuntimeError
    except RuntimeError:
        raise MaskError(
            f"a mask of shape {tuple(mask.shape)} does not broadcast to (B, H, Sq, Skv) = {sizes}"
        ) from None
    return full
