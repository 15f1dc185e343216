"""The block-sparse attention of cuDNN's front end, in CuTe: lists of whole key blocks, read when it runs."""

import torch

from benchmarks.peers import blocks
from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.system import Prepared

BLOCKS = (128, 64)


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """ImportError where a package is missing, RuntimeError for a mask that is not of whole blocks."""
    import cudnn
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    block, columns, counts, count = whole_blocks(pattern)
    columns = columns.expand(case.batch, case.heads, -1, -1).contiguous()
    counts = None if counts is None else counts.expand(case.batch, case.heads, -1).contiguous()

    def call(q, k, v):
        return block_sparse_attention_forward(q, k, v, columns, count, None, counts, sparse_block_size=block)[
            "o_tensor"
        ]

    variant = f"cudnn {cudnn.__version__} {block}x{block} {'counts' if count is None else f'{count} a row'}"
    return Prepared(call, variant)


def whole_blocks(pattern: Pattern) -> tuple[int, torch.Tensor, torch.Tensor | None, int | None]:
    """Side of the blocks, the columns that each row of them keeps, and the rows' counts, or one if they are equal."""
    side, counts, columns = blocks.whole_blocks(pattern, BLOCKS)
    most = columns.shape[-1]
    return (side, columns, None, most) if int(counts.min()) == most else (side, columns, counts, None)
