"""What the kernels of a block map read of the static mask: where each block row's lists begin, and their columns."""

import enum
from typing import NamedTuple

import numpy as np

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask

READ_AHEAD = 4  # tiles of entries that attention kernels may read past a row's last; more than any of them does
LIMIT = 2**31  # numbers are int32
COLUMNS = 2**16  # block columns are stored in 16 bits


class Place(enum.IntEnum):
    """The fields of a block row of a head, int32 each, in the order in which they lie in memory."""

    BEGIN = 0  # where its tiles of entries begin; they have room up to the next row's
    PART = 1  # its partial blocks of the static mask: PART … PART_END - 1
    PART_END = 2
    FULL = 3  # its full blocks: FULL … FULL_END - 1
    FULL_END = 4
    MAP = 5  # the first element of its row of the block map
    HEAD = 6  # head `HEAD % q_heads` of batch entry `HEAD // q_heads`
    FIRST = 7  # the column of its first full block if the others follow it without a gap, else -1


class Places(NamedTuple):
    """The static arrays, and how many entries the lists have room for.

    places : int32 (heads * block rows + 1, 8)
        See `Place`; row r of head h is entry h * block rows + r.  The last one has the end of all entries in BEGIN, and
        the number of partial blocks in PART.
    part_columns : int32 (partial blocks or 1,)
        The block column of each row of the mask's bitmap.
    full_columns : uint16 (full blocks or 1,)
        1 where no row needs them, for its full blocks follow one another.
    """

    places: np.ndarray
    part_columns: np.ndarray
    full_columns: np.ndarray
    room: int


def places_of(mask: BlockSparseMask, problem: AttentionProblem, together: int = 1) -> Places:
    """The arrays of a mask, the upper bound of the problem's block map, for tiles of so many blocks together.

    Raises UnsupportedError where a number does not fit its bits.
    """
    assert problem.block_map is not None
    given, heads, rows = problem.block_map, problem.batch * problem.q_heads, mask.n_block_rows
    map_shape = given.shape(problem.q_len, problem.kv_len)
    head, row = (x.reshape(-1) for x in np.mgrid[:heads, :rows])
    listed = mask.head_map(problem.batch, problem.q_heads).reshape(-1)[head] * rows + row
    places = np.zeros((heads * rows + 1, len(Place)), np.int64)
    places[:-1, Place.PART], places[:-1, Place.PART_END] = mask.part_row_ptr[listed], mask.part_row_ptr[listed + 1]
    places[:-1, Place.FULL], places[:-1, Place.FULL_END] = mask.full_row_ptr[listed], mask.full_row_ptr[listed + 1]
    lengths = mask.load_row_ptr[listed + 1] - mask.load_row_ptr[listed]
    ends = np.cumsum(np.maximum(-(-lengths // together), 1), dtype=np.int64)
    places[1:, Place.BEGIN] = ends
    places[-1, Place.BEGIN] += READ_AHEAD
    places[-1, Place.PART] = len(mask.part_col_idx)
    batch_entry, head_of_entry = np.divmod(head, problem.q_heads)
    entry = batch_entry % map_shape[0] * map_shape[1] + head_of_entry % map_shape[1]
    places[:-1, Place.MAP] = (entry * map_shape[2] + row // (given.block_m // mask.block_m)) * map_shape[3]
    places[:-1, Place.HEAD] = head
    runs = _runs(mask)
    places[:-1, Place.FIRST] = runs[listed]
    room = int(places[-1, Place.BEGIN]) * together
    most = max(int(np.prod(map_shape, dtype=np.int64)), int(places.max()), room)
    if most >= LIMIT:
        raise UnsupportedError(f"a block map of shape {map_shape} needs lists of {most} numbers; indices are 32-bit")
    if mask.n_block_cols > COLUMNS:
        raise UnsupportedError(f"a block map over {mask.n_block_cols} blocks of keys; at most {COLUMNS} are supported")
    read = ((runs < 0) & (mask.full_row_ptr[1:] > mask.full_row_ptr[:-1])).any()
    part_columns, full_columns = (
        x if len(x) else np.zeros(1, np.int32) for x in (mask.part_col_idx, mask.full_col_idx[: None if read else 0])
    )
    return Places(places.astype(np.int32), part_columns.astype(np.int32), full_columns.astype(np.uint16), room)


def _runs(mask: BlockSparseMask) -> np.ndarray:
    """int64 (block rows,): the first column of each row's full blocks if they are one run of columns, else -1."""
    begin, end = mask.full_row_ptr[:-1].astype(np.int64), mask.full_row_ptr[1:].astype(np.int64)
    columns = np.append(mask.full_col_idx, 0).astype(np.int64)
    first, last = columns[np.minimum(begin, len(columns) - 1)], columns[end - 1]  # ascending: a run has no gap
    return np.where((end > begin) & (last - first == end - begin - 1), first, -1)
