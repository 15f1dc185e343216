"""The mask arrays that CPU kernels read, and the order in which they visit block rows."""

import numpy as np

from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask


def mask_operands(mask: BlockSparseMask, problem) -> list[np.ndarray]:
    """unit_order, head_map, full_row_ptr, full_col_idx, part_row_ptr, part_col_idx (int32), bitmap (uint64).

    `unit_order` is int32 (batch * q_heads * n_block_rows,): the order in which block rows of heads are computed, unit
    `(b * q_heads + h) * n_block_rows + r`.  `head_map` is int32 (batch, q_heads).  Empty lists are padded to one
    element.  They are the same for every target.  MaskError where the mask's lengths or heads are not the problem's.
    """
    if (mask.q_len, mask.kv_len) != (problem.q_len, problem.kv_len):
        raise MaskError(f"the mask is {mask.q_len}×{mask.kv_len}, the attention {problem.q_len}×{problem.kv_len}")
    if mask.token_stride != 1:
        raise MaskError(f"the mask's blocks hold tokens {mask.token_stride} apart; this kernel takes consecutive ones")
    head_map = mask.head_map(problem.batch, problem.q_heads)
    blocks = np.diff(mask.load_row_ptr).reshape(mask.n_patterns, mask.n_block_rows)[head_map.reshape(-1)]
    return [
        spread(blocks.reshape(-1)),
        head_map,
        mask.full_row_ptr,
        _never_empty(mask.full_col_idx),
        mask.part_row_ptr,
        _never_empty(mask.part_col_idx),
        _never_empty(mask.bitmap),
    ]


def spread(cost: np.ndarray) -> np.ndarray:
    """int32 permutation of units in which every contiguous range has about its share of `cost`.

    TVM gives each thread one contiguous range of a parallel loop.  Units sorted by cost are taken in bit-reversed order
    (van der Corput): the first half is every second unit, the first quarter every fourth, and so on.
    """
    by_cost = np.argsort(-cost, kind="stable").astype(np.int32)
    bits = max(1, int(len(cost) - 1).bit_length())
    counter = np.arange(1 << bits)
    reversed_bits = np.zeros_like(counter)
    for bit in range(bits):
        reversed_bits |= ((counter >> bit) & 1) << (bits - 1 - bit)
    return by_cost[reversed_bits[reversed_bits < len(cost)]]


def _never_empty(array: np.ndarray) -> np.ndarray:
    """The array, or one row of zeros if it is empty: TVM passes no zero-sized tensors."""
    return array if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)
