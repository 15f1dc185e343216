"""Masks written for PyTorch's FlexAttention: a `mask_mod` function or a `BlockMask`, taken as they are."""

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from stof_tvm.masks import pattern
from stof_tvm.masks.arguments import FixedArray, check_int
from stof_tvm.masks.mask import Grid, Leaf, Mask
from stof_tvm.masks.tensors import block_layout
from tir_kernels.errors import MaskError


def from_mask_mod(mask_mod, batch: int | None = None, heads: int | None = None, device="cpu") -> Mask:
    """The mask that a FlexAttention `mask_mod(b, h, q_idx, kv_idx)` computes.

    It is called, in chunks, the way `create_mask` calls it: on 0-dimensional tensors on `device` under vmap, so
    it may index tensors that it captured (which must be on `device`).  A mask_mod that depends on b or h needs
    `batch` or `heads`; without, b and h are 0.  Two masks of the same function object are equal, so do not change
    the tensors that it captured.  MaskError where the function fails or returns something else than a boolean.
    """
    if not callable(mask_mod):
        raise MaskError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}")
    n_batch = 1 if batch is None else check_int("batch", batch, least=1)
    n_heads = 1 if heads is None else check_int("heads", heads, least=1)
    device = str(torch.device(device))
    entries = [[_mask_mod_at(mask_mod, b, h, device) for h in range(n_heads)] for b in range(n_batch)]
    sizes = "".join(f", {name}={size}" for name, size in (("batch", batch), ("heads", heads)) if size is not None)
    return Grid(entries, f"from_mask_mod({_name(mask_mod)}{sizes})") if sizes else entries[0][0]


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of a FlexAttention `BlockMask`: its full blocks whole, its partial blocks through its mask_mod.

    It fits the lengths of `block_mask` only.  MaskError for another type, and, when it is evaluated, for a sliced
    BlockMask, which has lost its mask_mod.
    """
    if not isinstance(block_mask, BlockMask):
        raise MaskError(f"from_block_mask needs a BlockMask, got {type(block_mask).__name__}")
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    shape = np.broadcast_shapes(partial.shape[:2], full.shape[:2])
    partial, full = (np.broadcast_to(listed, shape + listed.shape[2:]) for listed in (partial, full))
    mask_mod, device = block_mask.mask_mod, str(block_mask.kv_indices.device)

    def entry(b, h):
        partial_blocks, full_blocks = (_exactly(block_mask, listed[b, h]) for listed in (partial, full))
        return full_blocks | (partial_blocks & _mask_mod_at(mask_mod, b, h, device))

    entries = [[entry(b, h) for h in range(shape[1])] for b in range(shape[0])]
    return Grid(entries, f"from_block_mask(<BlockMask {tuple(block_mask.shape)} of {_name(mask_mod)}>)")


class _MaskModPattern(pattern.Opaque):
    """A mask_mod for one batch entry and head."""

    def __init__(self, mask_mod, b, h, device):
        self.mask_mod, self.device = mask_mod, device
        self.b, self.h = (torch.tensor(n, device=device) for n in (b, h))

    def keep(self, i, j):
        i, j = torch.from_numpy(i).to(self.device), torch.from_numpy(j).to(self.device)

        def of_rectangle(n, _, row, column):
            return self.mask_mod(self.b, self.h, i[n, row], j[n, column])

        try:
            kept = create_mask(of_rectangle, len(i), 1, i.shape[1], j.shape[1], device=self.device)
        except Exception as error:
            raise MaskError(f"mask_mod {_name(self.mask_mod)} failed: {type(error).__name__}: {error}") from error
        if kept.dtype != torch.bool:
            raise MaskError(f"mask_mod {_name(self.mask_mod)} must return a boolean, returned {kept.dtype}")
        return kept[:, 0].cpu().numpy()


def _mask_mod_at(mask_mod, b: int, h: int, device) -> Mask:
    arguments = {"mask_mod": mask_mod, "batch": b or None, "heads": h or None, "device": device}
    return Leaf(from_mask_mod, arguments, lambda q_len, kv_len: _MaskModPattern(mask_mod, b, h, device))


def _listed(block_mask: BlockMask, counts: torch.Tensor, columns: torch.Tensor) -> np.ndarray:
    """Boolean (batch, heads, block rows, block columns): the blocks that counts and columns list."""
    height, width = block_mask.BLOCK_SIZE
    rows, n_columns = (-(-length // size) for length, size in zip(block_mask.seq_lengths, (height, width), strict=True))
    indices = columns.cpu().numpy()
    indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
    valid = np.arange(indices.shape[-1]) < counts.cpu().numpy().reshape(indices.shape[:-1])[..., None]
    listed = np.zeros((*indices.shape[:2], rows, n_columns), np.bool_)
    b, h, r, k = np.nonzero(valid)
    listed[b, h, r, indices[b, h, r, k]] = True
    return listed


def _exactly(block_mask: BlockMask, cells: np.ndarray) -> Mask:
    """The blocks of one layout, at the lengths of the BlockMask and no others."""
    blocks = block_layout(FixedArray(cells), *block_mask.BLOCK_SIZE)
    lengths = tuple(block_mask.seq_lengths)

    def bind(q_len, kv_len):
        if (q_len, kv_len) != lengths:
            raise MaskError(f"a BlockMask for (q_len, kv_len) = {lengths} does not fit {(q_len, kv_len)}")
        return blocks.bind(q_len, kv_len)

    return Leaf(from_block_mask, {"block_mask": (*blocks.arguments.values(), lengths)}, bind)


def _name(function) -> str:
    return getattr(function, "__name__", type(function).__name__)
