"""FlexAttention, compiled: a mask_mod that reads a tensor or computes a formula, on Triton or on FlashAttention-4.

The BlockMask holds what `create_block_mask` finds, but is made from the dense mask, block row by block row, which needs
neither a compilation for each mask nor an integer array of the mask's size.
"""

import types

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import BLOCK, Pattern
from benchmarks.peers.system import Prepared

DEFAULT_BLOCK = 128


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """Compiled at its first call; uncompiled, and without the FLASH back-end, on the CPU (for dry runs)."""
    flash, tensor = "fa4" in system, system.endswith("tensor")
    if flash and device != "cuda":
        raise RuntimeError("FlexAttention's FLASH back-end needs a GPU")
    # Decoding masks consist of narrower key blocks, which the formula's author knows.
    kv_block = BLOCK if case.q_len == 1 and not tensor else DEFAULT_BLOCK
    keep, formula = pattern.dense, pattern.keep

    def read_mask(b, h, i, j):
        return keep[i, j]

    def compute_mask(b, h, i, j):
        return formula(i, j)

    block_mask = block_mask_of(keep, read_mask if tensor else compute_mask, (DEFAULT_BLOCK, kv_block))
    options = {"BACKEND": "FLASH"} if flash else None
    function = compiled_attention() if device == "cuda" else _attention
    gqa = case.heads != case.kv_heads
    return Prepared(
        call=lambda q, k, v: function(q, k, v, block_mask, gqa, options),
        variant=f"torch {torch.__version__} {'FLASH' if flash else 'Triton'} blocks {DEFAULT_BLOCK}x{kv_block}",
    )


def block_mask_of(keep: torch.Tensor, mask_mod, block: tuple[int, int]) -> BlockMask:
    """The BlockMask of a boolean (q_len, kv_len): full and partial blocks of `block`, columns ascending."""
    (q_len, kv_len), (height, width) = keep.shape, block
    padded = F.pad(keep, (0, -kv_len % width, 0, -q_len % height))
    columns = padded.shape[1] // width
    kept = torch.stack([row.view(height, columns, width).sum((0, 2)) for row in padded.split(height)])
    full = kept == height * width
    partial = (kept > 0) & ~full
    lists = [_lists(listed) for listed in (partial, full)]
    return BlockMask.from_kv_blocks(
        *lists[0], *lists[1], BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(q_len, kv_len)
    )


def _lists(listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts (1, 1, rows) and column indices (1, 1, rows, columns), listed ones first, both int32."""
    counts = listed.sum(dim=1, dtype=torch.int32)
    order = torch.argsort((~listed).to(torch.int8), dim=1, stable=True).to(torch.int32)
    return counts[None, None], order[None, None].contiguous()


def compiled_attention():
    """A torch.compile of its own, with an empty cache: no other case's guards are tried at its calls."""
    # The cache of compilations and its size limit hang on the code object.
    own = types.FunctionType(_attention.__code__.replace(), globals())
    return torch.compile(own, dynamic=False)


def _attention(q, k, v, block_mask, enable_gqa, kernel_options):
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, kernel_options=kernel_options)
