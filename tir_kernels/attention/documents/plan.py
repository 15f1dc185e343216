"""The plan of documents on a row: what attention kernels of GPUs read, written on the device for each set of lengths.

    states, keep_bits    what the documents keep of each block (keep_words.py)
    entries, counts      the blocks of each block row (listing.py)
    items                the block rows as work, long ones first (block_maps/order.py)

Every size is that of the longest documents, so a captured graph replays with any lengths.
"""

import numpy as np

from tir_kernels.attention.block_maps.places import LIMIT, READ_AHEAD, Place
from tir_kernels.attention.block_maps.plan import Reader
from tir_kernels.attention.documents.keep_words import distance_words, keep_words, width
from tir_kernels.attention.documents.listing import listing
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.template import Plan, Step
from tir_kernels.cuda.device import GPU
from tir_kernels.errors import UnsupportedError
from tir_kernels.template import Operands


def document_plan(
    problem: AttentionProblem,
    block: tuple[int, int],
    longest: int,
    keeps: np.ndarray | None,
    gpu: GPU,
    reader: Reader,
) -> Plan:
    """The plan for a kernel of a problem whose lists are written at run time; its steps read "bounds" (`tokens`).

    Parameters
    ----------
    problem : AttentionProblem
        Of a batch of 1 row, with a block map, and as many queries as keys.
    block : (int, int)
        Height and width of the kernel's blocks.
    longest : int
        No document is longer.
    keeps : np.ndarray, optional
        bool (2 * longest - 1,): the mask inside of documents at each distance key - query from 1 - longest on; all is
        kept without it.
    reader : Reader
        Of the kernel.

    Raises
    ------
    UnsupportedError
        Lists are too long for 32-bit indices.
    """
    (block_m, block_n), length = block, problem.q_len
    rows, heads = -(-length // block_m), problem.q_heads
    blocks = width(block_m, block_n, longest, length)
    words = rows * blocks * block_m * -(-block_n // 64) * 2
    if max(words, 2 * heads * rows * blocks) + 2 * READ_AHEAD >= LIMIT:
        raise UnsupportedError(
            f"documents of up to {longest} tokens on a row of {length} need lists of {words} words; indices are 32-bit"
        )
    limits = reader.limits(problem, rows, blocks, gpu)
    places = np.zeros((heads * rows + 1, len(Place)), np.int32)
    places[:, Place.BEGIN] = np.arange(heads * rows + 1) * blocks
    constants = {"places": places}
    given: tuple[str, ...] = ("bounds",)
    if keeps is not None:
        constants["distances"] = distance_words(keeps)
        given = "bounds", "distances"
    keep_bits = (rows * blocks + 1, block_m // 16, 32, -(-block_n // 64)), "uint32"
    entries = (heads * rows * blocks + READ_AHEAD, 2), "int32"
    steps = {
        "keep_words": Step(
            keep_words(block_m, block_n, longest, keeps is not None),
            given,
            {"states": ((rows, blocks), "int32"), "keep_bits": keep_bits},
        ),
        "listing": Step(
            listing(block_m, block_n, longest, reader.never_empty),
            ("states",),
            {"entries": entries, "counts": ((heads * rows, 2), "int32")},
        ),
        "order": reader.ordering(block_m, block_n, limits),
    }
    return Plan(constants, steps, ("items", "entries", "keep_bits"), Operands.of([], reader.workspace(limits.slots)))
