"""Dense matrix multiplication: a register tile accumulates over the whole of K, the epilogue reads the tile from L1.

    parallel (batch, row block, column tile): row tile: k: rows x vectors multiply-adds; then the epilogue

An operand that needs work (a ragged length, a conversion to fp32, a transposed B) is copied tile by tile, zero-padded,
so that the inner loops never see an edge: A one row tile at a time, B one column tile for a whole block of row tiles.
B is copied as well where several row tiles read it: a column tile of a wide matrix lies in rows that are far apart, of
which the cache keeps few.
"""

import functools
import math
import operator

import tvm
from tvm import tirx
from tvm.sym.iter_affine_map import IterMapLevel, detect_iter_map

from relax_passes.schedule.cpu_rules import blocks as blk
from relax_passes.schedule.cpu_rules.products.contraction import match_contraction
from relax_passes.schedule.cpu_rules.products.tile import (
    COLUMNS,
    PANEL_ROW_TILES,
    PANEL_VECTORS,
    ROW_TILES,
    TILE_ROWS,
    TILE_VECTORS,
    Tile,
    ceil_div,
    choose_tile,
    row_tiles_a_task,
)
from relax_passes.schedule.cpu_rules.simd import Simd

# If at least this many row tiles share B's column tile, it is copied for them.  On a Zen 3, copies made products with
# 128 rows and more 1.3× to 2× faster in fp32, 1.1× to 1.3× in fp16.
SHARED_TILES = 4
# Multiply-adds that one core does in the time of a parallel launch.
SERIAL_MULTIPLY_ADDS = 1 << 18


def tile_contraction(sch, block, simd: Simd) -> None:
    """Schedule a product that `match_contraction` accepts, with the maps that feed it and the one that reads it."""
    roles = match_contraction(sch, block)
    assert roles is not None
    sizes = [blk.extent(sch, loop) for loop in sch.get_loops(block)]
    annotations = sch.get(block).annotations
    if TILE_ROWS not in annotations:
        tile = choose_tile(1 if roles.row is None else sizes[roles.row], sizes[roles.column], simd)
    else:
        rows, vectors = int(annotations[TILE_ROWS]), int(annotations[TILE_VECTORS])
        tile = Tile(rows, vectors, simd.lanes, pads_rows=False, pads_columns=False)
    row_tiles = row_tiles_a_task(
        1 if roles.row is None else ceil_div(sizes[roles.row], tile.rows),
        ceil_div(sizes[roles.column], tile.columns),
        *(sizes[i] for i in roles.outer),
        limit=PANEL_ROW_TILES if TILE_ROWS in annotations else ROW_TILES,
    )
    _pad(sch, block, roles, tile)
    a_copy, b_copy = _copies(sch, block, roles, row_tiles >= SHARED_TILES)
    # The accumulators stay in registers only where every access of them is unrolled: the epilogue reads a copy.
    epilogue = _epilogue(sch, block)
    spill = sch.cache_write(block, 0, "global")

    # One parallel loop of tasks, the row tiles of a task, k, the tile.
    outer, row, column, k = _loops(sch, block, roles)
    row = row or sch.add_unit_loop(block)
    row_tile, row = sch.split(row, [None, tile.rows])
    panel_vectors = int(annotations.get(PANEL_VECTORS, tile.vectors))
    factors = [None, tile.vectors // panel_vectors, panel_vectors, tile.lanes]
    column_tile, panel, vector, lane = sch.split(column, factors)
    row_block, row_tile = sch.split(row_tile, [None, row_tiles])
    sch.reorder(*outer, row_block, column_tile, row_tile, k, row, panel, vector, lane)
    task = sch.fuse(*outer, row_block, column_tile)

    sch.reverse_compute_at(spill, row_tile)
    blk.vectorize_last(sch, spill, tile.lanes)
    for loop in sch.get_loops(spill)[2:-1]:
        sch.unroll(loop)
    if epilogue is not None and blk.try_schedule(sch.reverse_compute_at, epilogue, row_tile) and not tile.pads_columns:
        blk.vectorize_last(sch, epilogue, tile.lanes)
    for copy, loop in ((a_copy, row_tile), (b_copy, task)):
        if copy is not None:
            sch.compute_at(copy, loop)
            blk.vectorize_last(sch, copy, simd.lanes)
    sch.vectorize(lane)
    for loop in (row, panel, vector):
        sch.unroll(loop)
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or math.prod(known) > SERIAL_MULTIPLY_ADDS:
        sch.parallel(task)
    sch.decompose_reduction(block, k)


def _loops(sch, block, roles):
    """The block's loops by role: those of a task, the row (None where C has one row), the column, k."""
    loops = sch.get_loops(block)
    row = None if roles.row is None else loops[roles.row]
    return [loops[i] for i in roles.outer], row, loops[roles.column], loops[roles.depth]


def _pad(sch, block, roles, tile) -> None:
    """Let the block run over whole tiles of zero-padded copies of its operands; the epilogue, or a copy, crops."""
    factors = [1] * len(sch.get(block).iter_vars)
    if tile.pads_rows:
        factors[roles.row] = tile.rows
    if tile.pads_columns:
        factors[roles.column] = tile.columns
    if factors.count(1) == len(factors):
        return
    epilogue = _epilogue(sch, block)
    sch.pad_einsum(block, factors)
    for copy in sch.get_producers(block):
        if (source := _only_map(sch, sch.get_producers(copy))) and len(sch.get_consumers(source)) == 1:
            sch.compute_inline(source)
    if epilogue is not None:
        sch.compute_inline(*sch.get_consumers(block))


def _copies(sch, block, roles, is_shared: bool):
    """The blocks that copy A and B into tiles; None for an operand that is read in place.

    `is_shared` says that a tile of B is read several times.
    """
    a_copy, b_copy = (_own_producer(sch, block, read) for read in (roles.a, roles.b))
    if TILE_ROWS in sch.get(block).annotations:
        b_copy = None
    elif roles.b_is_transposed:
        b_copy = b_copy or sch.cache_read(block, roles.b, "global")
        sch.transform_layout(block, ("read", roles.b), lambda *axes: (*axes[:-2], axes[-1], axes[-2]))
    elif is_shared:
        b_copy = b_copy or sch.cache_read(block, roles.b, "global")
    elif b_copy is not None and not blk.calls_in(sch.get(b_copy).body.value, ("prim.if_then_else",)):
        # A conversion costs one instruction a vector: less than another trip through memory.
        sch.compute_inline(b_copy)
        b_copy = None
    return a_copy, b_copy


def _own_producer(sch, block, read: int):
    """The map that writes this operand for this block alone, or None."""
    buffer = sch.get(block).reads[read].source
    writers = [p for p in sch.get_producers(block) if sch.get(p).writes[0].source.same_as(buffer)]
    writer = _only_map(sch, writers)
    return writer if writer is not None and len(sch.get_consumers(writer)) == 1 else None


def _epilogue(sch, block):
    """The map that alone reads the product, each element of it for exactly one element of its own; else None.

    A map that pads, joins, repeats or slices the product does not count: some of its elements belong to no tile of the
    product, or to two.
    """
    epilogue = _only_map(sch, sch.get_consumers(block))
    if epilogue is None:
        return None
    stmt, product = sch.get(epilogue), sch.get(block).writes[0].source
    loads = [load for load in blk.loads_in(stmt.body.value) if load.source.same_as(product)]
    guarded = [load for call in blk.calls_in(stmt.body.value, ("prim.if_then_else",)) for load in blk.loads_in(call)]
    if any(load.same_as(other) for load in loads for other in guarded):
        return None
    domain = {axis.var: axis.dom for axis in stmt.iter_vars}
    elements = functools.reduce(operator.mul, [d.extent for d in domain.values()], 1)
    read = functools.reduce(operator.mul, _kept_shape(sch.get(block)), 1)
    is_one_to_one = lambda load: detect_iter_map(load.indices, domain, True, IterMapLevel.Bijective).indices
    is_whole = tvm.sym.Analyzer().can_prove_equal(elements, read)
    return epilogue if is_whole and all(map(is_one_to_one, loads)) else None


def _kept_shape(stmt) -> list:
    """The shape of a product without the rows and columns that fill its last tiles (packed_weights.py)."""
    shape = list(stmt.writes[0].source.ty.shape)
    if COLUMNS in stmt.annotations:
        shape[-1] = int(stmt.annotations[COLUMNS])
    clamps = [index for load in blk.loads_in(stmt.body) for index in load.indices if isinstance(index, tirx.Min)]
    for clamp in clamps:
        shape = [clamp.b + 1 if at.same_as(clamp.a) else n for at, n in zip(stmt.body.indices, shape, strict=True)]
    return shape


def _only_map(sch, blocks):
    """The block, where there is exactly one and it is a map; else None."""
    return blocks[0] if len(blocks) == 1 and blk.is_injective(sch, blocks[0]) else None
