"""Kernels of our own for rules, where PyTorch's operators take longer than the attention that they are for."""

import functools
from collections.abc import Callable, Sequence

import torch

from stof_tvm.running.gpus import on_gpu
from tir_kernels.attention.compiled import compile_step
from tir_kernels.compiling.quick_script import no_frames_left
from tir_kernels.selection.largest import largest
from tir_kernels.selection.last_weights import normalizers, sums
from tir_kernels.selection.vertical_slash_map import vertical_slash_map
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
        _kernel(scores.device, largest)(rows, kept, n)
    return kept.reshape(scores.shape)


def sums_of_last_on_gpu(products: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 (B, H, n), twice: the causal weights of the last queries, summed by key and by distance.

    Their products with all n keys are float32 (B, H, rows, n), not yet multiplied by the scale.  The sums of a head are
    NaN where a row's softmax is, which is NaN also at keys that it does not see.
    """
    (batch, heads, rows, n), device = products.shape, products.device
    lines = products.contiguous().view(-1, n)
    normalizer = torch.empty(len(lines), 2, device=device)
    by_key, by_distance = (torch.empty(batch, heads, n, device=device) for _ in range(2))
    _kernel(device, normalizers)(lines, normalizer, rows, scale)
    _kernel(device, sums)(lines, normalizer, by_key.view(-1, n), by_distance.view(-1, n), rows, scale)
    return by_key, by_distance


def vertical_slash_on_gpu(
    places: Sequence[torch.Tensor],
    forced: tuple[int, int],
    rows: tuple[int, int],
    length: int,
    block: tuple[int, int],
) -> torch.Tensor:
    """Bool (B, H, rows, key blocks): the blocks of these rows, first and end, that hold a chosen pair j <= i.

    The places are those of columns j and of distances i - j, int64 (B, H, any), each less how many of the first are
    `forced`, which are chosen, too.  There must be a kernel that `takes` the block.
    """
    batch, heads = places[0].shape[:2]
    kept = torch.empty(
        batch, heads, rows[1] - rows[0], -(-length // block[1]), dtype=torch.bool, device=places[0].device
    )
    if kept.numel():
        given = (_at_least_one(x).flatten(0, 1).contiguous() for x in places)
        made = _kernel(kept.device, vertical_slash_map, block)
        made(*given, kept.view(-1, *kept.shape[2:]), *(min(n, length) for n in forced), rows[0], length)
    return kept


def _at_least_one(places: torch.Tensor) -> torch.Tensor:
    """The places, or where there are none one that is no place: kernels take no empty arrays."""
    return places if places.shape[-1] else places.new_full((*places.shape[:-1], 1), -1)


@functools.cache
def _kernel(device: torch.device, make: Callable, *args):
    """make(*args), compiled for a device and launched there."""
    arch = cuda_arch(*torch.cuda.get_device_capability(device))
    with no_frames_left():  # those above hold tensors
        step = compile_step(make(*args), parse_target({"kind": "cuda", "arch": arch}))

    def launch(*arrays):
        with on_gpu(device.index):
            step(*arrays)

    return launch
