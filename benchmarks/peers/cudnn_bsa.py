"""The block-sparse attention of cuDNN's front end, in CuTe: lists of whole key blocks, read when it runs."""

import torch

from benchmarks.peers.blocks import block_lists, kept_in_blocks
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
    for side in BLOCKS:
        kept = kept_in_blocks(pattern.chunks(), (side, side))
        full = kept == side * side
        if bool((full | (kept == 0)).all()):
            counts, columns = block_lists(full)
            least, most = int(counts.min()), int(counts.max())
            if least == 0:
                raise RuntimeError("rows that keep nothing are not measured")
            columns = columns[..., :most]
            return (side, columns, None, most) if least == most else (side, columns, counts, None)
    raise RuntimeError(f"mask {pattern.name!r} is not of whole blocks of {' or '.join(map(str, BLOCKS))}")
