"""FastVideo's block-sparse attention for Hopper: lists of whole blocks of 64 keys for each 64 queries, in bfloat16."""

import os
import sys
from collections.abc import Callable

import torch

from benchmarks.peers.blocks import whole_blocks
from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.system import Prepared
from benchmarks.peers.systems import FASTVIDEO_DIMS, FASTVIDEO_DTYPE

BLOCK = 64  # the wheel's kernel for Hopper has no other size
GPU = (9, 0)


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """ImportError where the wheel is missing, RuntimeError for what its kernel does not compute."""
    if case.dtype != FASTVIDEO_DTYPE or case.head_dim not in FASTVIDEO_DIMS or case.batch != 1:
        dims = " or ".join(map(str, FASTVIDEO_DIMS))
        raise RuntimeError(
            f"FastVideo's kernel takes {FASTVIDEO_DTYPE}, heads of {dims} and batch 1, "
            f"not {case.dtype}, heads of {case.head_dim} and batch {case.batch}"
        )
    if case.q_len % BLOCK or case.kv_len % BLOCK:
        raise RuntimeError(f"lengths {case.q_len} and {case.kv_len} are no multiples of {BLOCK}")
    _, counts, columns = whole_blocks(pattern, (BLOCK,))
    counts, columns = (x.expand(1, case.heads, *x.shape[2:]).contiguous() for x in (counts, columns))
    return Prepared(block_sparse(counts, columns, full_blocks(case.kv_len, device)), f"fastvideo {version()} 64x64")


def block_sparse(counts: torch.Tensor, columns: torch.Tensor, sizes: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A call of the kernel with q (1, H, Sq, D), k and v (1, Hkv, Skv, D), contiguous, multiples of 64 tokens.

    Counts (1, H, Sq / 64), columns (1, H, Sq / 64, most) and sizes (Skv / 64,), how many keys of a block are there, are
    int32.  Every block of queries must have a block of keys: the kernel waits for its first one whatever the count is.
    """
    kernels = operators()
    return lambda q, k, v: kernels.block_sparse_fwd(q, k, v, columns, counts, sizes)[0]


def full_blocks(length: int, device: str) -> torch.Tensor:
    """The sizes of the blocks of keys where none is padded."""
    return torch.full((length // BLOCK,), BLOCK, dtype=torch.int32, device=device)


def operators():
    """The wheel's extension; RuntimeError on other GPUs than Hopper, where its kernels are empty."""
    # Its calls between GPUs need a newer NCCL than PyTorch may bring.  Nothing here calls them, or looks for them.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        from fastvideo_kernel._C import fastvideo_kernel_ops
    finally:
        sys.setdlopenflags(flags)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != GPU:
        raise RuntimeError(f"FastVideo's kernels are for compute capability {GPU[0]}.{GPU[1]}")
    return fastvideo_kernel_ops


def version() -> str:
    import fastvideo_kernel

    return fastvideo_kernel.__version__
