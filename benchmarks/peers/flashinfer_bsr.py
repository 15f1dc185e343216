"""FlashInfer's block-sparse wrapper, 64 × 64 blocks, the batch as one block-diagonal matrix; where it is installed."""

import functools

import torch
import torch.nn.functional as F

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import BLOCK, Pattern
from benchmarks.peers.system import Prepared

WORKSPACE_BYTES = 128 << 20


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """ImportError where flashinfer is not installed."""
    import flashinfer

    height = min(BLOCK, case.q_len)
    if case.q_len % height or case.kv_len % BLOCK:
        raise RuntimeError(f"lengths {case.q_len} and {case.kv_len} are no multiples of the block")
    indptr, indices, bits = blocks_of(pattern.dense, height, case.batch)
    # "fa2" is the only back-end that takes bits, and the only one without half a gigabyte of buffers a wrapper.
    wrapper = flashinfer.BlockSparseAttentionWrapper(_workspace(device), backend="fa2")
    rows, keys = case.batch * case.q_len, case.batch * case.kv_len
    sizes = (rows, keys, height, BLOCK, case.heads, case.kv_heads, case.head_dim)
    wrapper.plan(indptr, indices, *sizes, mask=bits, q_data_type=getattr(torch, case.dtype))
    out_shape = (case.batch, case.q_len, case.heads, case.head_dim)
    return Prepared(
        wrapper.run,
        variant=f"flashinfer {flashinfer.__version__} {height}x{BLOCK}{'' if bits is None else ' masked'}",
        arrange=lambda *tensors: tuple(x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors),
        restore=lambda out: out.view(out_shape).transpose(1, 2),
    )


def blocks_of(keep: torch.Tensor, height: int, batch: int):
    """indptr, indices (int32) and bits (blocks, height, 64) of `batch` copies of a mask; no bits if all are full."""
    rows, columns = keep.shape[0] // height, keep.shape[1] // BLOCK
    cells = keep.view(rows, height, columns, BLOCK).transpose(1, 2)
    listed = cells.any(dim=3).any(dim=2)
    row, column = torch.nonzero(listed, as_tuple=True)
    counts = listed.sum(dim=1).repeat(batch)
    indptr = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    shift = torch.arange(batch, device=keep.device)[:, None] * columns
    indices = (column[None] + shift).flatten().to(torch.int32)
    bits = cells[row, column]
    return indptr, indices, None if bool(bits.all()) else bits.repeat(batch, 1, 1)


@functools.cache
def _workspace(device: str) -> torch.Tensor:
    """Scratch memory of a call, so that all wrappers of a process share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
