"""Alignment of tensors for compiled code."""

import torch

# TVM allocates tensors on 64-byte boundaries and emits aligned vector loads, without a check at run time: a tensor made
# from NumPy, or a slice of one, would crash the process.
ALIGNMENT = 64


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself where its data starts on a 64-byte boundary, else a copy that does."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
