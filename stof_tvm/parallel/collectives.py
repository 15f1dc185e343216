"""The collectives that a rank's program calls: packed functions over torch.distributed, on the caller's stream."""

import functools
import itertools

import torch
import torch.distributed as dist
import tvm_ffi

from stof_tvm.parallel.ranks import Peers

_numbers = itertools.count()


@functools.cache
def all_reduce_of(peers: Peers) -> str:
    """The name of the packed function that adds up a tensor over the ranks.

    It takes the tensor and where the sum goes, of the same shape and dtype; these may be the same memory.  On a GPU it
    runs on PyTorch's current stream, and a CUDA graph that is being captured gets NCCL's kernels.  It raises
    ParallelError where a rank is gone.
    """
    name = f"stof.all_reduce.{next(_numbers)}"

    def all_reduce(term, total) -> None:
        term, total = torch.from_dlpack(term), torch.from_dlpack(total)
        if term.data_ptr() != total.data_ptr():
            total.copy_(term)
        peers.collective(
            "an all-reduce",
            total.device.type == "cpu",
            lambda async_op: dist.all_reduce(total, group=peers.group, async_op=async_op),
        )

    tvm_ffi.register_global_func(name, all_reduce)
    return name


@functools.cache
def all_gather_of(peers: Peers) -> str:
    """The name of the packed function that gathers a tensor of every rank.

    It takes the tensor (…) and where all of them go, (ranks, …) of the same dtype.  Streams, graphs and errors are as
    `all_reduce_of` has them.
    """
    name = f"stof.all_gather.{next(_numbers)}"

    def all_gather(part, parts) -> None:
        # As bytes, for gloo moves no bfloat16.
        part, parts = (torch.from_dlpack(x).view(-1).view(torch.uint8) for x in (part, parts))
        peers.collective(
            "an all-gather",
            part.device.type == "cpu",
            lambda async_op: dist.all_gather_into_tensor(parts, part, group=peers.group, async_op=async_op),
        )

    tvm_ffi.register_global_func(name, all_gather)
    return name


@functools.cache
def exchange_of(peers: Peers) -> str:
    """The name of the packed function that gives each of two ranks the other's tensor, between CPUs.

    It takes the tensor and where the other rank's goes, of the same shape and dtype.  Errors are as `all_reduce_of` has
    them.
    """
    name = f"stof.exchange.{next(_numbers)}"

    def exchange(own, other) -> None:
        # As bytes, for gloo moves no bfloat16.
        own, other = (torch.from_dlpack(x).view(-1).view(torch.uint8) for x in (own, other))
        parts = [torch.empty_like(own), other]
        peers.collective(
            "an exchange of terms",
            True,
            lambda async_op: dist.all_gather(
                parts if peers.rank == 0 else parts[::-1], own, group=peers.group, async_op=async_op
            ),
        )

    tvm_ffi.register_global_func(name, exchange)
    return name
