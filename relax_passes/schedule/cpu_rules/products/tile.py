"""The register tile of a product, and how many tiles make a task."""

import functools
import math
from dataclasses import dataclass

from relax_passes.schedule.cpu_rules.simd import Simd

# Annotations of a product with a matrix in panels: its tile, vectors in a panel, and how many columns the matrix has.
TILE_ROWS, TILE_VECTORS, PANEL_VECTORS = "stof.tile_rows", "stof.tile_vectors", "stof.panel_vectors"
COLUMNS = "stof.columns"
# Row tiles that share a column tile of B while it is in L2.
ROW_TILES = 16
# Row tiles that share a panel of B: a panel lies in one piece, so it stays in L2 while rows of A pass by.
PANEL_ROW_TILES = 64
# Parallel tasks below which cores would wait for each other.
MIN_TASKS = 8
# The most vectors in a tile: a matrix-vector product reads this many of one row of B before the next.
MAX_VECTORS = 8


@dataclass(frozen=True)
class Tile:
    """A tile of rows x (vectors * lanes) elements of C; a side that does not divide the matrix is padded."""

    rows: int
    vectors: int
    lanes: int
    pads_rows: bool
    pads_columns: bool

    @property
    def columns(self) -> int:
        """The width of the tile, in elements."""
        return self.vectors * self.lanes


def choose_tile(rows: int | None, columns: int | None, simd: Simd) -> Tile:
    """The tile that fills the accumulators and pads least; None stands for a symbolic length."""
    best = 8 if simd.registers >= 32 else 6
    tile_rows, pads_rows = best, True
    if rows is not None:
        divisors = [r for r in range(best, best // 2, -1) if rows % r == 0]
        tile_rows = rows if rows <= best else (divisors or [best])[0]
        pads_rows = rows % tile_rows != 0
    budget = min(simd.accumulators // tile_rows, MAX_VECTORS)
    if columns is not None:
        lanes = next((n for n in (16, 8, 4) if n <= simd.lanes and columns % n == 0), None)
        if lanes is not None:
            vectors = max(v for v in range(1, budget + 1) if columns // lanes % v == 0)
            if 2 * vectors >= min(budget, columns // lanes):
                return Tile(tile_rows, vectors, lanes, pads_rows, pads_columns=False)
        budget = min(budget, -(-columns // simd.lanes))
    return Tile(tile_rows, budget, simd.lanes, pads_rows, pads_columns=True)


@functools.cache
def panel_vectors(columns: int, simd: Simd) -> int:
    """How many vectors wide the panels of a matrix are: the same for all numbers of rows that it may be multiplied by.

    So engines for several lengths, or for prompts and single tokens, hold a matrix once.  Of the widths whose tiles
    take the least time, over few rows and many, it is the widest: one piece of memory to read, not several.
    """
    counts = (1, 2, 3, 4, 8, None)
    least = {rows: _tile_and_cycles(rows, columns, simd, 1, any_width=True)[1] for rows in counts}

    def loss(width):
        ratios = [_tile_and_cycles(rows, columns, simd, width)[1] / least[rows] for rows in counts]
        return round(sum(ratios), 3), -width

    return min(range(1, MAX_VECTORS + 1), key=loss)


def choose_panel_tile(rows: int | None, columns: int, simd: Simd) -> Tile:
    """The tile of a product with a matrix in panels (`panel_vectors`), zero-padded: as wide as a few of them.

    `packed_weights.py` pads rows to whole tiles as well.  `rows` is None for a symbolic length.
    """
    width = panel_vectors(columns, simd)
    (r, v), _ = _tile_and_cycles(rows, columns, simd, width)
    return Tile(r, v, simd.lanes, rows is None or rows % r != 0, columns % (width * simd.lanes) != 0)


def _tile_and_cycles(rows: int | None, columns: int, simd: Simd, width: int, any_width: bool = False):
    """The tile (rows, vectors) of least predicted time, and this time, cycles; a row's where their number is unknown.

    A tile takes multiply-adds, of which two start in a cycle and each takes four, rows of B from L2, a vector a cycle,
    and to a small part loads and the loop.  Tiles consist of whole panels and divide all panels evenly, unless
    `any_width` is set: then they may be as wide as they like.
    """
    most_rows = 8 if simd.registers >= 32 else 6
    panels = -(-columns // (width * simd.lanes))
    widths = [v for v in range(1, MAX_VECTORS + 1) if any_width or (v % width == 0 and panels % (v // width) == 0)]
    # Beside the accumulators, a register holds a value of A, and others a row of B unless each vector is used once.
    fits = lambda r, v: r * v <= simd.accumulators and r * v + 1 + (v if r > 1 else 0) <= simd.registers

    def cycles(shape):
        r, v = shape
        tiles = -(-columns // (v * simd.lanes)) * (1 / r if rows is None else -(-rows // r))
        return tiles * (max(r * v / 2, v, 4) + (r + v + 5) / 20)

    shapes = [(r, v) for v in widths for r in range(1, most_rows + 1) if fits(r, v)]
    tile = min(shapes, key=cycles)
    return tile, cycles(tile)


def ceil_div(size: int | None, by: int) -> int | None:
    """size / by, rounded up; None for an unknown size."""
    return None if size is None else -(-size // by)


def row_tiles_a_task(
    row_tiles: int | None, column_tiles: int | None, *outer: int | None, limit: int = ROW_TILES
) -> int:
    """The number of row tiles in a task: as many as share B's column tile well, but fewer if tasks would be too few."""
    if row_tiles is None:
        return limit
    others = math.prod(size or MIN_TASKS for size in (column_tiles, *outer))
    most = max(1, min(limit, row_tiles, row_tiles * others // MIN_TASKS))
    even = max(n for n in range(1, most + 1) if row_tiles % n == 0)
    return even if 2 * even >= most else most
