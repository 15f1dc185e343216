"""Selections by kernels of our own, where PyTorch's take longer than the attention that they are for."""

import functools

import torch

from tir_kernels.attention.compiled import compile_step
from tir_kernels.compiling.quick_script import no_frames_left
from tir_kernels.selection.largest import largest
from tir_kernels.target import cuda_arch, parse_target

LONG = 20_000  # columns: a row that is longer keeps a CTA too long: PyTorch shares it among several


def largest_on_gpu(scores: torch.Tensor, n: int) -> torch.Tensor:
    """Boolean like scores (..., columns), floating point on a GPU: the n largest of each row, but none of -inf.

    NaN is larger than any number.  Of equal scores the first are taken, in rows of at most LONG.
    """
    if scores.shape[-1] > LONG:
        chosen = scores.topk(min(n, scores.shape[-1]), dim=-1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
        return kept & (scores != -torch.inf)
    rows = scores.float().reshape(-1, scores.shape[-1]).contiguous()
    kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    if kept.numel():
        _kernel(scores.device)(rows, kept, n)
    return kept.reshape(scores.shape)


@functools.cache
def _kernel(device: torch.device):
    arch = cuda_arch(*torch.cuda.get_device_capability(device))
    with no_frames_left():  # those above hold tensors
        return compile_step(largest(), parse_target({"kind": "cuda", "arch": arch}))
