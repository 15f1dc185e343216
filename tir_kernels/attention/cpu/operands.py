"""The mask arrays that CPU kernels read, as arrays and as buffers, and the order in which they visit block rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask


def mask_operands(mask: BlockSparseMask, problem) -> list[np.ndarray]:
    """unit_order, head_map, full_row_ptr, full_col_idx, part_row_ptr, part_col_idx (int32), bitmap (uint64).

    `unit_order` is int32 (batch * q_heads * n_block_rows,): the order in which block rows of heads are computed, unit
    `(b * q_heads + h) * n_block_rows + r`.  With positions a unit is a row, and its cost is known when it runs: units
    `(b * q_heads + h) * q_len + s` are in order.  `head_map` is int32 (batch, q_heads).  Empty lists are padded to one
    element.  The arrays are the same for every target.  MaskError if the mask's lengths or heads are not the problem's.
    """
    if (mask.q_len, mask.kv_len) != (problem.mask_rows, problem.kv_len):
        raise MaskError(f"the mask is {mask.q_len}×{mask.kv_len}, the attention {problem.mask_rows}×{problem.kv_len}")
    if mask.token_stride != 1:
        raise MaskError(f"the mask's blocks hold tokens {mask.token_stride} apart; this kernel takes consecutive ones")
    head_map = mask.head_map(problem.batch, problem.q_heads)
    return [
        _unit_order(mask, head_map, problem),
        head_map,
        mask.full_row_ptr,
        _never_empty(mask.full_col_idx),
        mask.part_row_ptr,
        _never_empty(mask.part_col_idx),
        _never_empty(mask.bitmap),
    ]


def _unit_order(mask: BlockSparseMask, head_map: np.ndarray, problem) -> np.ndarray:
    if problem.has_positions:
        return np.arange(problem.batch * problem.q_heads * problem.q_len, dtype=np.int32)
    blocks = np.diff(mask.load_row_ptr).reshape(mask.n_patterns, mask.n_block_rows)[head_map.reshape(-1)]
    return spread(blocks.reshape(-1))


@dataclass(frozen=True)
class Lists:
    """A kernel's buffers of a mask: block lists int32 in compressed sparse rows, bitmap uint64 (n_part, tiles)."""

    full_row_ptr: Any
    full_col_idx: Any
    part_row_ptr: Any
    part_col_idx: Any
    bitmap: Any

    @property
    def buffers(self) -> tuple:
        """All buffers, in argument order."""
        return self.full_row_ptr, self.full_col_idx, self.part_row_ptr, self.part_col_idx, self.bitmap

    def row_bytes(self):
        """The bitmap as uint8 (n_part, 8 * tiles); call it while a kernel is parsed.

        Row r of a partial block's 8 x 8 tile is byte r of its uint64 (little-endian), and tiles are column-major: the
        bytes of a tile column are the rows of the block in order.
        """
        n_part, tiles = self.bitmap.shape
        octets = T.decl_buffer((n_part, tiles * 8), "uint8", data=self.bitmap.data, align=1)
        return IRBuilder.name("row_bytes", octets)


def match_lists(full_row_ptr, full_col_idx, part_row_ptr, part_col_idx, bitmap, tiles: int) -> Lists:
    """Buffers of these arguments, for blocks of `tiles` 8 x 8 tiles; call it while a kernel is parsed."""
    n_rows, n_full, n_part = (IRBuilder.name(name, T.int32()) for name in ("n_rows", "n_full", "n_part"))

    def match(name, handle, shape, dtype="int32"):
        return IRBuilder.name(name, T.match_buffer(handle, shape, dtype))

    return Lists(
        match("full_row_ptr", full_row_ptr, (n_rows,)),
        match("full_col_idx", full_col_idx, (n_full,)),
        match("part_row_ptr", part_row_ptr, (n_rows,)),
        match("part_col_idx", part_col_idx, (n_part,)),
        match("bitmap", bitmap, (n_part, tiles), "uint64"),
    )


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
