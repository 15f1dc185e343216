"""FlexAttention, compiled: a mask_mod that reads a tensor or computes a formula, on Triton or on FlashAttention-4.

The BlockMask holds what `create_block_mask` finds, but is made from the mask's rows, some at a time, which needs
neither a compilation for each mask nor an integer array of the mask's size.
"""

import types
from collections.abc import Iterable

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.peers.blocks import block_lists, kept_in_blocks
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
    keep, formula = pattern.dense if tensor else None, pattern.keep

    def read_mask(b, h, i, j):
        return keep[i, j]

    def compute_mask(b, h, i, j):
        return formula(i, j)

    block = DEFAULT_BLOCK, kv_block
    lengths = pattern.q_len, pattern.kv_len
    block_mask = block_mask_of(pattern.chunks(), lengths, read_mask if tensor else compute_mask, block)
    options = {"BACKEND": "FLASH"} if flash else None
    function = compiled_attention() if device == "cuda" else _attention
    gqa = case.heads != case.kv_heads
    return Prepared(
        call=lambda q, k, v: function(q, k, v, block_mask, gqa, options),
        variant=f"torch {torch.__version__} {'FLASH' if flash else 'Triton'} blocks {DEFAULT_BLOCK}x{kv_block}",
    )


def block_mask_of(chunks: Iterable[torch.Tensor], lengths: tuple[int, int], mask_mod, block) -> BlockMask:
    """The BlockMask of a mask given as its rows (see `kept_in_blocks`): full and partial blocks, columns ascending."""
    kept = kept_in_blocks(chunks, block)
    full = kept == block[0] * block[1]
    partial, full = block_lists((kept > 0) & ~full), block_lists(full)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)


def compiled_attention():
    """A torch.compile of its own, with an empty cache: no other case's guards are tried at its calls."""
    # The cache of compilations and its size limit hang on the code object.
    own = types.FunctionType(_attention.__code__.replace(), globals())
    return torch.compile(own, dynamic=False)


def _attention(q, k, v, block_mask, enable_gqa, kernel_options):
    return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, kernel_options=kernel_options)
