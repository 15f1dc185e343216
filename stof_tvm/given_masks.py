"""What is accepted as a mask: a Mask, a bool tensor or array, a FlexAttention BlockMask or mask_mod function."""

import inspect
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from stof_tvm import masks
from stof_tvm.masks.flex import of_one_pattern, taken_directly
from stof_tvm.masks.identity import Identity
from tir_kernels.errors import MaskError

GivenAsMask = masks.Mask | torch.Tensor | np.ndarray | BlockMask | Callable


class GivenMask(NamedTuple):
    """A mask's identity, and a function that makes the Mask if a cache does not know it: caches hold no dense array."""

    identity: Identity | None
    make: Callable[[], masks.Mask | None]


NO_MASK = GivenMask(None, lambda: None)


def check_given(mask) -> None:
    """MaskError if `given_mask` would refuse `mask` whatever the attention's sizes."""
    if isinstance(mask, torch.Tensor | np.ndarray):
        if str(mask.dtype).removeprefix("torch.") != "bool":
            raise MaskError(
                f"a mask tensor must be bool (True is kept), got {mask.dtype}: one of 1 (kept) and 0 is "
                f"{_as_bool(mask)}; "
                "masks.from_tensor takes one of 0 (kept) and -inf; other scores are a bias (bias= of sparse_attention)"
            )
    elif isinstance(mask, masks.Mask | BlockMask):
        pass
    elif isinstance(mask, masks.runtime.Rule):
        raise MaskError(
            f"{mask!r} is a rule, which finds its blocks from q and k: build, sparse_attention and masks.recall take "
            "one, and rule & mask is one; where a static mask is asked for, rule.mask(q, k) is what it keeps for some "
            "q and k"
        )
    elif isinstance(mask, str):
        raise MaskError(
            f"mask is the text {reprlib.repr(mask)}: texts are for the command line, in Python call the function, as "
            "masks.sliding_window(16); the name of a file of masks ends in .json"
        )
    elif not callable(mask) or isinstance(mask, type):
        raise MaskError(
            "mask must be a Mask, a bool tensor or array, a BlockMask or a mask_mod function, "
            f"got {type(mask).__name__} {reprlib.repr(mask)}"
        )
    else:
        _check_called(mask)


def _check_called(function: Callable) -> None:
    """MaskError for a function of this package that makes masks or rules, given instead of what it makes."""
    name = getattr(function, "__name__", "")
    for module, where, made in ((masks, "masks", "mask"), (masks.runtime, "masks.runtime", "rule")):
        if name in module.__all__ and getattr(module, name) is function:
            parameters = inspect.signature(function).parameters.values()
            arguments = "…" if any(parameter.default is parameter.empty for parameter in parameters) else ""
            raise MaskError(f"{where}.{name} is a function that makes a {made}; call it: {where}.{name}({arguments})")


def _as_bool(mask) -> str:
    return "mask.bool()" if isinstance(mask, torch.Tensor) else "mask.astype(bool)"


def given_mask(mask, sizes: tuple[int, int, int, int]) -> GivenMask:
    """The mask of a call whose attention has `sizes` (B, H, Sq, Skv); MaskError if `mask` is no mask or does not fit.

    A tensor is hashed once for each of its versions.  The blocks of a BlockMask are read once for each version of its
    tensors.  An array, and what a function reads, is read again at each call.
    """
    if mask is None:
        return NO_MASK
    check_given(mask)
    if isinstance(mask, np.ndarray):
        mask = masks.from_tensor(_spread_lengths(torch.tensor(mask), sizes))
    elif isinstance(mask, torch.Tensor):
        return _of_tensor(mask, sizes)
    elif isinstance(mask, BlockMask):
        mask = _of_block_mask(mask)
    elif not isinstance(mask, masks.Mask):
        mask = taken_directly(mask, *sizes[:2])
    return GivenMask(mask.identity, lambda: mask)


def comparable(given):
    """A given mask, or masks by path, with tensors and arrays made Masks: PyTorch compares a backend's options."""
    if isinstance(given, Mapping):
        return {path: comparable(mask) for path, mask in given.items()}
    if isinstance(given, torch.Tensor | np.ndarray) and given.ndim > 0:
        check_given(given)
        return masks.from_tensor(given if given.ndim > 1 else given[None])
    return given


def opened(given):
    """The masks of a .json file whose name is given (`masks.load`); anything else as it is.

    InputError where there is no such file, MaskError for one that holds no masks.
    """
    is_file = isinstance(given, Path) or isinstance(given, str) and given.endswith(".json")
    return masks.load(given) if is_file else given


def own_masks(given):
    """A given mask, or masks by path or of a file, with copies of tensors and arrays, which nobody else writes to."""
    given = opened(given)
    if isinstance(given, Mapping):
        return {path: own_masks(mask) for path, mask in given.items()}
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    return given.copy() if isinstance(given, np.ndarray) else given


def without_sizes(given) -> masks.Mask:
    """The Mask for an operand of & or |, where no attention's sizes are known.

    MaskError if `given` is not a mask, or is a function that depends on the batch entry or the head.
    """
    check_given(given)
    if isinstance(given, BlockMask):
        return _of_block_mask(given)
    if isinstance(given, torch.Tensor | np.ndarray):
        return comparable(given if given.ndim else given[None])
    if not isinstance(given, masks.Mask):
        return of_one_pattern(given)
    return given


_tensors = WeakIdKeyDictionary()  # tensor -> (version, sizes, identity)
_block_masks = WeakIdKeyDictionary()  # BlockMask -> (its function, tensors and their versions, mask)


def _of_tensor(tensor: torch.Tensor, sizes) -> GivenMask:
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
        is_padding = tuple(mask.shape) == (sizes[0], sizes[3])
        hint = "; of padding, (B, Skv), it is mask[:, None, None]" if is_padding else ""
        raise MaskError(
            f"a mask of shape {tuple(mask.shape)} does not broadcast to (B, H, Sq, Skv) = {sizes}{hint}"
        ) from None
    return full
