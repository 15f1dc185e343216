"""The plan of rows: the lists of the CUDA row-wise kernel, computed at run time from each query's row of the mask.

Where rows are known, `operands.py` makes the kernel's `work`, `columns` and `keep_bits` in advance.  Where they are the
rows `positions` of a mask of (kv_len, kv_len) elements, five small functions make them in every call.  They read the
block lists of the whole mask.  All are elementwise in their result, so any schedule runs them, on any target.

    spans      which block rows the queries of a list need, each once, and how many blocks these have
    entries    the blocks of a list, one after another
    columns    16 tokens for each tile; a block has block_n / 16 tiles, which follow one another
    keep_bits  the keep bits of every tile, also of those of full blocks
    work       an equal share of a list's tiles for each CTA of a unit; a share may be empty

A list has the tokens of one row tile, as in `operands.py`; equal ones are shared.  It has room for as many blocks as
its queries can need, whatever their positions are; tiles past its last block are not read.

A negative position counts from the end.  One that is outside of the mask gives the row the nearest key alone, whatever
the mask keeps of it: whoever wrote a key there wrote a NaN (tir_kernels/scatter.py), which makes the row NaN.
"""

from dataclasses import dataclass

import numpy as np
from tvm import te, tirx

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise.geometry import TOKENS, record_shape
from tir_kernels.attention.row_wise.operands import rows_of_units, split_counts
from tir_kernels.attention.template import Plan, Step
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.bitmap import pack_bitmap
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

LANES, BITS = 32, 8  # a tile of 16×16 has 8 keep bits in each lane
FIELDS = 8  # of a work item


def row_plan(problem: AttentionProblem, mask: BlockSparseMask, gpu: GPU) -> Plan:
    """The plan of a problem with positions, for a mask of (kv_len, kv_len) in blocks of any height and of 16·n columns.

    The kernel's operands are work, columns and keep_bits, and the workspace partials and arrivals, as
    `row_wise_operands` explains them; keep_bits has a row for each row of columns.
    """
    lists = _Lists.of(problem, mask)
    splits = split_counts(np.full(len(lists.of_unit), lists.room * (mask.block_n // TOKENS)), problem, gpu)
    unit = np.repeat(np.arange(len(splits)), splits)
    slots = np.where(splits > 1, splits, 0)
    first_slot, split = np.cumsum(slots) - slots, np.arange(len(unit)) - np.repeat(np.cumsum(splits) - splits, splits)
    shares = np.zeros((len(unit), FIELDS), np.int32)
    shares[:, 0], shares[:, 5], shares[:, 6], shares[:, 7] = (
        unit,
        first_slot[unit],
        splits[unit],
        first_slot[unit] + split,
    )
    constants = {
        **lists.constants,
        "shares": shares,
        "list_of_share": np.stack([lists.of_unit[unit], split], axis=1).astype(np.int32),
    }
    functions = _Functions(problem, mask, lists, {name: (x.shape, str(x.dtype)) for name, x in constants.items()})
    n_slots, units = max(1, int(slots.sum())), len(splits)
    workspace = ((n_slots, *record_shape(problem)), "float32"), ((units,), "uint32")
    rest = Operands((), workspace, unwritten=not slots.any())
    return Plan(constants, functions.steps(), ("work", "columns", "keep_bits"), rest)


@dataclass(frozen=True)
class _Lists:
    """The token lists of a problem.

    Attributes
    ----------
    constants : dict of np.ndarray, int32 but for the last
        row_ptr (block rows + 3,), columns and parts (blocks,): the blocks of all patterns' block rows, and of two more:
        the first key alone, the last key alone.  A part is the row of octets, -1 for a full block.  pairs (lists, D, 2)
        are the distinct queries with their patterns: first block row of the pattern, or -1 for no query, and query.
        slots (lists, 16): the pair of each row, or -1.  octets uint8 (parts, block_m * block_n / 8).
    of_unit : np.ndarray
        The list of each unit.
    room : int
        The most blocks of a list.
    """

    constants: dict[str, np.ndarray]
    of_unit: np.ndarray
    room: int

    @classmethod
    def of(cls, problem: AttentionProblem, mask: BlockSparseMask) -> "_Lists":
        rows, of_unit = np.unique(rows_of_units(mask, problem), axis=0, return_inverse=True)
        distinct = [np.unique(row[row >= 0]) for row in rows]
        pairs = np.full((len(rows), max(map(len, distinct)), 2), -1, np.int32)
        slots = np.full(rows.shape, -1, np.int32)
        for i, (row, known) in enumerate(zip(rows, distinct)):
            pattern, query = np.divmod(known, problem.q_len)
            pairs[i, : len(known)] = np.stack([pattern * mask.n_block_rows, query], axis=1)
            slots[i, row >= 0] = np.searchsorted(known, row[row >= 0])
        blocks, parts = _blocks(mask)
        row_ptr = np.concatenate([mask.load_row_ptr, mask.load_row_ptr[-1] + [1, 2]]).astype(np.int32)
        longest = np.maximum(1, np.diff(mask.load_row_ptr).reshape(mask.n_patterns, -1).max(axis=1))
        room = max(int(longest[known // problem.q_len].sum()) for known in distinct)
        constants = {"row_ptr": row_ptr, "blocks": blocks, "parts": parts, "pairs": pairs, "slots": slots}
        constants["octets"] = _octets(mask)
        return cls(constants, of_unit.reshape(-1), room)


def _blocks(mask: BlockSparseMask) -> tuple[np.ndarray, np.ndarray]:
    """Block columns, and their rows of octets or -1, of all block rows, then of the two that have one key alone."""
    parts = np.full(len(mask.load_col_idx), -1, np.int32)
    rows = np.repeat(np.arange(len(mask.part_row_ptr) - 1), np.diff(mask.part_row_ptr))
    listed = np.repeat(np.arange(len(mask.load_row_ptr) - 1), np.diff(mask.load_row_ptr))
    # Columns ascend in each block row, so (row, column) does throughout.
    key = lambda row, column: row.astype(np.int64) * mask.n_block_cols + column
    parts[np.searchsorted(key(listed, mask.load_col_idx), key(rows, mask.part_col_idx))] = np.arange(len(rows))
    n_part = len(rows)
    blocks = np.concatenate([mask.load_col_idx, [0, mask.n_block_cols - 1]])
    return blocks.astype(np.int32), np.concatenate([parts, [n_part, n_part + 1]]).astype(np.int32)


def _octets(mask: BlockSparseMask) -> np.ndarray:
    """Bitmaps as uint8 (parts + 2, octets): byte c * block_m + r has columns 8c … 8c + 7 of row r of a block."""
    alone = np.zeros((2, mask.block_m, mask.block_n), np.bool_)
    alone[0, :, 0] = alone[1, :, (mask.kv_len - 1) % mask.block_n] = True
    bitmap = np.concatenate([mask.bitmap.reshape(-1, mask.block_m * mask.block_n // 64), pack_bitmap(alone)])
    return np.ascontiguousarray(bitmap.astype("<u8", copy=False)).view(np.uint8)


class _Functions:
    """The five functions of a plan, each with its inputs by name."""

    def __init__(self, problem: AttentionProblem, mask: BlockSparseMask, lists: _Lists, shapes: dict):
        self.length, self.block_m, self.block_n = problem.kv_len, mask.block_m, mask.block_n
        self.block_rows = mask.n_patterns * mask.n_block_rows
        self.room, self.tiles_of_block = lists.room, mask.block_n // TOKENS
        self.n_lists, self.n_pairs, _ = lists.constants["pairs"].shape
        self.n_tiles = self.n_lists * self.room * self.tiles_of_block
        self.given = {name: te.placeholder(shape, dtype, name=name) for name, (shape, dtype) in shapes.items()}
        self.share_shape = shapes["shares"][0]
        self.given["positions"] = te.placeholder((problem.q_len,), "int64", name="positions")
        self.given["spans"] = te.placeholder((self.n_lists, self.n_pairs, 3), "int32", name="spans")
        self.given["entries"] = te.placeholder((self.n_lists * self.room, 2), "int32", name="entries")

    def steps(self) -> dict[str, Step]:
        """All of them, by the name of their one result, in order."""
        return {
            "spans": self._spans(),
            "entries": self._entries(),
            "columns": self._columns(),
            "keep_bits": self._keep_bits(),
            "work": self._work(),
        }

    def _step(self, name: str, inputs: tuple[str, ...], shape: tuple[int, ...], dtype: str, element) -> Step:
        out = te.compute(shape, lambda *index: element(*index).astype(dtype), name="out")
        function = te.create_prim_func([*(self.given[name] for name in inputs), out])
        attrs = {"tirx.noalias": True, "op_pattern": 8}
        return Step(function.with_attrs(attrs).without_attr("global_symbol"), inputs, {name: (shape, dtype)})

    def _spans(self) -> Step:
        """int32 (lists, D, 3): block row of a pair, or -1; row in the block; blocks, 0 if an earlier pair has them."""
        positions, pairs, row_ptr = (self.given[name] for name in ("positions", "pairs", "row_ptr"))

        def position(i, d):
            given = positions[tirx.max(pairs[i, d, 1], 0)]
            return tirx.Select(given < 0, given + self.length, given)

        def inside(i, d):
            return tirx.max(tirx.min(position(i, d), self.length - 1), 0).astype("int32")

        def block_row(i, d):
            row = pairs[i, d, 0] + tirx.floordiv(inside(i, d), self.block_m)
            row = tirx.Select(position(i, d) >= self.length, self.block_rows + 1, row)
            return tirx.Select(pairs[i, d, 0] < 0, -1, tirx.Select(position(i, d) < 0, self.block_rows, row))

        rows = te.compute((self.n_lists, self.n_pairs), block_row, name="rows")

        def count(i, d):
            row = tirx.max(rows[i, d], 0)
            first = [tirx.any(d <= e, rows[i, e] != rows[i, d]) for e in range(self.n_pairs - 1)]
            return tirx.Select(tirx.all(rows[i, d] >= 0, *first), row_ptr[row + 1] - row_ptr[row], 0)

        def span(i, d, field):
            row = tirx.floormod(inside(i, d), self.block_m)
            return tirx.Select(field == 0, rows[i, d], tirx.Select(field == 1, row, count(i, d)))

        return self._step("spans", ("positions", "pairs", "row_ptr"), (self.n_lists, self.n_pairs, 3), "int32", span)

    def _entries(self) -> Step:
        """int32 (lists * room, 2): a list's blocks, as their entries in `blocks`, and the block rows that they are of.

        (0, -1) past its last block.
        """
        spans, row_ptr = self.given["spans"], self.given["row_ptr"]

        def entry(n, field):
            i, place = tirx.floordiv(n, self.room), tirx.floormod(n, self.room)
            first, entry, block_row = tirx.const(0, "int32"), tirx.const(0, "int32"), tirx.const(-1, "int32")
            for d in range(self.n_pairs):  # the block is of one pair at most
                row, count = spans[i, d, 0], spans[i, d, 2]
                is_here = tirx.all(place >= first, place < first + count)
                entry += tirx.Select(is_here, row_ptr[tirx.max(row, 0)] + place - first, 0)
                block_row += tirx.Select(is_here, row + 1, 0)
                first += count
            return tirx.Select(field == 0, entry, block_row)

        return self._step("entries", ("spans", "row_ptr"), (self.n_lists * self.room, 2), "int32", entry)

    def _columns(self) -> Step:
        """int32 (lists * tiles, 16)."""
        entries, blocks = self.given["entries"], self.given["blocks"]

        def column(t, token):
            block = blocks[entries[tirx.floordiv(t, self.tiles_of_block), 0]]
            column = block * self.block_n + tirx.floormod(t, self.tiles_of_block) * TOKENS + token
            return tirx.min(column, self.length - 1)

        return self._step("columns", ("entries", "blocks"), (self.n_tiles, TOKENS), "int32", column)

    def _keep_bits(self) -> Step:
        """uint32 (lists * tiles, 1, 32, 1), in the order of `lane_keep_bits`."""
        names = "entries", "spans", "parts", "slots", "octets"
        entries, spans, parts, slots, octets = (self.given[name] for name in names)

        def word(t, _m, lane, _w):
            n = tirx.floordiv(t, self.tiles_of_block)
            part, block_row, i = parts[entries[n, 0]], entries[n, 1], tirx.floordiv(n, self.room)
            result = tirx.const(0, "uint32")
            for bit in range(BITS):
                slot = slots[i, bit % 4 // 2 * 8 + tirx.floordiv(lane, 4)]
                pair = tirx.max(slot, 0)
                octet = tirx.floormod(t, self.tiles_of_block) * 2 + bit // 4
                byte = octets[tirx.max(part, 0), octet * self.block_m + spans[i, pair, 1]].astype("uint32")
                kept = (byte >> (tirx.floormod(lane, 4) * 2 + bit % 2).astype("uint32")) & tirx.const(1, "uint32")
                is_own = tirx.all(slot >= 0, block_row >= 0, spans[i, pair, 0] == block_row)
                kept = tirx.Select(part < 0, tirx.const(1, "uint32"), kept)
                result |= tirx.Select(is_own, kept << tirx.const(bit, "uint32"), tirx.const(0, "uint32"))
            return result

        return self._step("keep_bits", names, (self.n_tiles, 1, LANES, 1), "uint32", word)

    def _work(self) -> Step:
        """int32 (CTAs, 8): all tiles of a list are masked, by the keep bits of their number."""
        spans, shares, list_of_share = (self.given[name] for name in ("spans", "shares", "list_of_share"))

        def item(cta, field):
            i, split, of = list_of_share[cta, 0], list_of_share[cta, 1], shares[cta, 6]
            tiles = self.tiles_of_block * sum(spans[i, d, 2] for d in range(self.n_pairs))
            end = lambda n: i * (self.room * self.tiles_of_block) + tirx.floordiv(tiles * n, of)
            bounds = tirx.Select(field == 1, end(split), end(split + 1))
            return tirx.Select(tirx.any(field == 1, field == 2), bounds, shares[cta, field])

        inputs = "spans", "shares", "list_of_share"
        return self._step("work", inputs, self.share_shape, "int32", item)
