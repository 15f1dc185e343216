"""Sizes of the CUDA matrix-product kernels: tiles, shared memory and registers of a configuration for a problem."""

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from tir_kernels.cuda.device import H200
from tir_kernels.cuda.float32.modes import fragment_words
from tir_kernels.cuda.registers import PRODUCER_THREADS, consumer_registers, resident_warps
from tir_kernels.cuda.shared_tiles import (
    CHUNK_BYTES,
    MMA_COLS,
    MMA_ROWS,
    PANEL,
    STEP_BYTES,
    PanelTile,
    SharedTile,
    WordTile,
    chunk_elements,
    element_bytes,
)
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.problem import GATE_COLUMNS, STATISTICS_COLUMNS, GemmProblem
from tir_kernels.fusion.steps import VECTOR, operand_words

FLOAT_BYTES = 4
PAIR_BYTES = 8  # of shared memory: a row's mean and scale
STAGING_PAD = 8  # floats: 4 rows of accumulators written together then meet 32 different banks
FLAG_BYTES = 16  # of shared memory: a flag that tells a CTA whether it arrived last
GROUP_M = 8  # tiles along m that are worked on together, so that they share tiles of w in the L2 cache
FEW_N_TILES, FEW_GROUP_M = 12, 1  # up to so many tiles along n, so many along m
MAX_REGISTERS = 255
NORM_VECTORS = 12  # that a lane holds at most of several rows; one row alone may have more
NORM_AHEAD = 4  # vectors of a norm's weight and bias that a lane holds
GROUP_WARPS = 4  # warps of a warpgroup, which multiply together
BARRIER_BYTES = 8
STORED_K = 184  # an H200 multiplies (790 TFLOP/s) and stores (4.3 TB/s) for equally long at this k
CLUSTERS = (2, 4)  # CTAs of a cluster; eight were slower in every sweep


@dataclass(frozen=True)
class GemmGeometry:
    """The Python integers that the kernels' code is generated from."""

    problem: GemmProblem
    config: GemmConfig

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a and w."""
        return element_bytes(self.problem.dtype)

    @property
    def threads(self) -> int:
        """Threads of a CTA: those that multiply, and the warpgroup that copies where there is one."""
        return 32 * self.config.sets * self.config.warps + PRODUCER_THREADS * self.config.tma

    @property
    def warp_m(self) -> int:
        """Rows of the CTA's tile that a warp owns."""
        return self.config.block_m // self.config.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of the CTA's tile that a warp owns."""
        return self.config.block_n // self.config.warps_n

    @property
    def row_tiles(self) -> int:
        """m16 tiles of a warp."""
        return self.warp_m // MMA_ROWS

    @property
    def col_tiles(self) -> int:
        """n8 tiles of a warp."""
        return self.warp_n // MMA_COLS

    @property
    def steps(self) -> int:
        """Steps of a block: k16, or k8 of float32."""
        return self.config.block_k * self.element_bytes // STEP_BYTES

    @property
    def columns_each(self) -> int:
        """Columns of the product from which one of the result comes."""
        return self.problem.w_columns // self.problem.n

    @property
    def out_warp_n(self) -> int:
        """Columns of the result that a warp owns."""
        return self.warp_n // self.columns_each

    @property
    def row_tile_step(self) -> int:
        """Rows from an m16 tile of a warp to its next one: the tiles of a warpgroup's warps alternate."""
        return MMA_ROWS * GROUP_WARPS if self.config.warpgroup else MMA_ROWS

    def warp_row(self, warp):
        """The first row of a warp in the CTA's tile; also for a symbolic warp."""
        if not self.config.warpgroup:
            return warp // self.config.warps_n * self.warp_m
        group = warp // GROUP_WARPS
        return group // self.config.warps_n * (GROUP_WARPS * self.warp_m) + warp % GROUP_WARPS * MMA_ROWS

    def warp_column(self, warp):
        """The first column of a warp in the CTA's tile; also for a symbolic warp."""
        unit = warp // GROUP_WARPS if self.config.warpgroup else warp
        return unit % self.config.warps_n * self.warp_n

    # -- the grid: tiles of the product, splits of one tile next to each other ------------------------------------

    @property
    def m_tiles(self) -> int:
        """Tiles along m; those of each part of a batch."""
        return self.problem.batch * self.part_tiles

    @property
    def part_tiles(self) -> int:
        """Tiles along m that are multiplied by the same matrix of w."""
        return -(-self.problem.rows // self.config.block_m)

    @property
    def n_tiles(self) -> int:
        """Tiles along n."""
        return -(-self.problem.w_columns // self.config.block_n)

    @property
    def group_m(self) -> int:
        """Tiles along m that CTAs take together, one after another, before they go on along n.

        Neighbouring CTAs read at the same time what they share: rows of a, where few tiles lie along n.
        """
        few = self.config.tma and not self.in_clusters and self.n_tiles <= FEW_N_TILES
        return FEW_GROUP_M if few else GROUP_M

    @property
    def k_blocks(self) -> int:
        """Blocks of block_k along k."""
        return -(-self.problem.k // self.config.block_k)

    @property
    def blocks_per_split(self) -> int:
        """Blocks along k of a split; the last splits may have fewer."""
        return -(-self.k_blocks // self.config.splits)

    @property
    def ctas(self) -> int:
        """Tiles times splits: the CTAs of the grid if no CTA takes several tiles."""
        return self.m_tiles * self.n_tiles * self.config.splits

    @property
    def in_clusters(self) -> bool:
        """Whether the splits of a tile are a cluster of CTAs, which read each other's shared memory."""
        return self.config.tma and self.config.splits > 1

    @cached_property
    def tail(self) -> "GemmGeometry | None":
        """The sizes of the narrower tiles after whole waves (`waves.py`), as if all were of this kind; None without."""
        if not self.config.tail_n:
            return None
        return GemmGeometry(self.problem, replace(self.config, block_n=self.config.tail_n, tail_n=0))

    @property
    def m_ends(self) -> bool:
        """Whether the last tile along m has rows that do not exist; in a batch it overlaps with the one before."""
        return self.problem.batch == 1 and self.problem.m % self.config.block_m != 0

    @property
    def n_ends(self) -> bool:
        """Whether the last tile along n has columns that do not exist."""
        return self.problem.w_columns % self.config.block_n != 0

    @property
    def k_ends(self) -> bool:
        """Whether the last block along k has elements that do not exist."""
        return self.problem.k % self.config.block_k != 0

    # -- shared memory --------------------------------------------------------------------------------------------

    @cached_property
    def a_tile(self) -> SharedTile:
        return self._operand_tile(self.config.block_m, self.config.block_k, self.threads)

    @cached_property
    def w_tile(self) -> SharedTile:
        if self.problem.w_layout == "nk":
            return self._operand_tile(self.config.block_n, self.config.block_k, self.threads)
        return self._operand_tile(self.config.block_k, self.config.block_n, self.threads, along_n=True)

    def _operand_tile(self, rows: int, dim: int, threads: int, along_n: bool = False) -> SharedTile:
        if self.problem.dtype == "float32":
            return (WordTile if along_n else SharedTile)(rows, dim, threads, element_bytes=self.element_bytes)
        return (PanelTile if self.config.warpgroup else SharedTile)(rows, dim, threads)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage takes: one tile of a and one of w."""
        return self.a_tile.size + self.w_tile.size

    @property
    def staging_rows(self) -> int:
        """Rows of a warp that pass through shared memory together: few if the stages stay in use."""
        few = max(MMA_ROWS // 2, 32 * VECTOR // self.staging_columns)  # a vector for each lane
        return few if self.config.tma else MMA_ROWS

    @property
    def staging_columns(self) -> int:
        """Columns of a warp that pass through shared memory together: few if the stages stay in use.

        It is a power of two, so that the lanes of a warp divide evenly among rows.
        """
        columns = self.out_warp_n & -self.out_warp_n
        return min(columns, PANEL) if self.config.tma else columns

    @property
    def column_parts(self) -> int:
        """Parts of a warp's columns that pass through shared memory one after the other."""
        return self.out_warp_n // self.staging_columns

    @property
    def staging_pitch(self) -> int:
        """Floats from one row to the next of a warp's rows on their way to the epilogue."""
        return self.staging_columns + STAGING_PAD

    @property
    def second_half(self) -> int:
        """Bytes from the first four elements of a row's vectors to the last four, chosen to avoid bank conflicts."""
        return (self.staging_columns // 2 + 4) * FLOAT_BYTES

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory through which one warp passes its results."""
        return self.staging_rows * self.staging_pitch * FLOAT_BYTES

    @property
    def finishes_in_registers(self) -> bool:
        """Whether the steps are applied to the accumulators, before they go through shared memory.

        Their operands are vectors then: the same for all rows of a lane.  A gate's results take a half of the tile
        only, and gain nothing from it.
        """
        p, (_, matrix_words) = self.problem, operand_words(self.problem.steps, self.problem.dtype)
        whole_rows = p.norm is not None or p.row_norm is not None or p.statistics
        # A lane loads two neighbours of a vector at once: of an odd number, the last one has none.
        even = p.n % 2 == 0 or all(step.operand is None for step in p.steps)
        takes = p.gate is None and not whole_rows and matrix_words == 0 and even
        return takes and self.config.tma and not self.in_clusters

    @property
    def streams(self) -> bool:
        """Whether the result, of which the L2 cache keeps a part only, takes longer to store than to multiply.

        Stores that take no line of the L1 cache are 13 % faster then, at 4096 × 30000 × 128; elsewhere they are up to
        11 % slower.
        """
        p = self.problem
        return p.k < STORED_K and p.m * p.n * self.element_bytes > H200.l2_bytes

    @property
    def rounded_pitch(self) -> int:
        """Bytes from one row of rounded results to the next on their way through shared memory."""
        return self.staging_columns * self.element_bytes + CHUNK_BYTES

    @property
    def staging_offset(self) -> int:
        """Offset of the staging memory: at the stages, or behind them if they stay in use for a next tile."""
        return self.config.stages * self.stage_bytes if self.config.tma and not self.in_clusters else 0

    @property
    def sync_offset(self) -> int:
        """Offset of the `FLAG_BYTES`; with TMA, of the barriers: two for each stage, and two for the turns of sets."""
        staging = self.sums_bytes if self.in_clusters else self.config.sets * self.config.warps * self.staging_bytes
        staging_end = self.staging_offset + staging
        return max(self.config.stages * self.stage_bytes, staging_end)

    @property
    def row_norm_offset(self) -> int:
        """Offset of a deferred norm's data: `row_norm_bytes` for each warp, or for all warps of a cluster's CTA."""
        return self.sync_offset + (2 * (self.config.stages + 1) * BARRIER_BYTES if self.config.tma else FLAG_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        warps = 1 if self.in_clusters else self.config.sets * self.config.warps
        return self.row_norm_offset + warps * self.row_norm_bytes

    # -- a deferred norm: vectors of the columns, means and scales of the rows that a warp or a cluster's CTA stores ---

    @property
    def row_norm_parts(self) -> int:
        """Pairs of statistics in a row of the matrix that is normalised."""
        return (self.problem.k if self.problem.a_norm is not None else self.problem.n) // STATISTICS_COLUMNS

    @property
    def normed_rows(self) -> int:
        return self.config.block_m // self.config.splits if self.in_clusters else self.warp_m

    @property
    def normed_columns(self) -> int:
        return self.config.block_n if self.in_clusters else self.warp_n

    @property
    def normed_vectors(self) -> int:
        """Vectors of the norm (weight, bias) kept for each column: none for an RMSNorm of a, whose weight is in w."""
        norm = self.problem.row_norm
        return 0 if norm is None or (norm is self.problem.a_norm and norm.kind == "rms_norm") else 2

    @property
    def row_norm_bytes(self) -> int:
        if self.problem.row_norm is None:
            return 0
        return self.pairs_offset + self.normed_rows * PAIR_BYTES

    @property
    def pairs_offset(self) -> int:
        """Offset of the means and scales inside `row_norm_bytes`."""
        return self.normed_vectors * self.normed_columns * FLOAT_BYTES

    # -- a cluster's epilogue: each CTA has the sums of its split in shared memory, and finishes a share of the tile ---

    @property
    def sums_pitch(self) -> int:
        """Bytes from one row of a split's sums to the next."""
        return (self.config.block_n + STAGING_PAD) * FLOAT_BYTES

    @property
    def sums_second_half(self) -> int:
        """Bytes from the first four elements of a vector to the last four, in the sums of a split."""
        return (self.config.block_n // 2 + 4) * FLOAT_BYTES

    @property
    def sums_bytes(self) -> int:
        """Bytes of shared memory that the sums of one split take."""
        return self.config.block_m * self.sums_pitch

    @property
    def share_passes(self) -> int:
        """Vectors of a CTA's share of the tile that a thread finishes."""
        threads = self.config.splits * (self.threads - PRODUCER_THREADS)
        return self.config.block_m * self.config.block_n // VECTOR // threads

    # -- the epilogue: a lane works on vectors of 8 elements, always in the same columns --------------------------

    @property
    def row_vectors(self) -> int:
        """Vectors in one row of a warp's tile, or of the part of it that is staged together."""
        return self.staging_columns // VECTOR

    @property
    def rows_per_pass(self) -> int:
        """Rows in which the 32 lanes of a warp work on one vector each."""
        return 32 // self.row_vectors

    @property
    def passes(self) -> int:
        """Vectors of a lane in the rows that are staged together."""
        return self.staging_rows // self.rows_per_pass

    # -- the norm: a warp holds whole rows in registers -----------------------------------------------------------

    @property
    def norm_vectors(self) -> int:
        """Vectors of a lane in a row."""
        return -(-self.problem.n // (32 * VECTOR))

    @property
    def norm_rows(self) -> int:
        """Rows that a warp normalises together."""
        rows = self.config.block_m // self.config.warps
        while rows > 1 and rows * self.norm_vectors > NORM_VECTORS:
            rows //= 2
        return rows

    @property
    def n_split_counters(self) -> int:
        """Arrival counters of splits: one a tile, none where k is not split."""
        return self.m_tiles * self.n_tiles if self.config.splits > 1 and not self.in_clusters else 0

    @property
    def n_counters(self) -> int:
        """Arrival counters: of the splits of each tile, then of the tiles of each row of tiles."""
        return self.n_split_counters + (self.m_tiles if self.problem.norm is not None else 0)

    # -- registers ------------------------------------------------------------------------------------------------

    @cached_property
    def registers(self) -> int:
        """Estimate of a thread's 32-bit registers."""
        return _registers(self.problem, replace(self.config, stages=1, splits=1))  # it depends on neither of these

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs whose registers fit one multiprocessor, at most 16 warps, or 2 CTAs with TMA; 0 if one would spill."""
        if self.config.tma:
            fitting = 2 if H200.ctas_that_share(self.shared_bytes) >= 2 else 1
            enough = (n for n in range(fitting, 0, -1) if consumer_registers(self.threads, n) >= self.registers)
            return next(enough, 0)
        if self.registers > MAX_REGISTERS:
            return 0
        warps = resident_warps(-(-self.registers // 8) * 8)
        return min(warps // self.config.warps, 16 // self.config.warps)


@functools.lru_cache(maxsize=1 << 12)
def _registers(problem: GemmProblem, config: GemmConfig) -> int:
    """Accumulators, two sets of fragments and an observed number for the rest; cached, because few values occur."""
    g = GemmGeometry(problem, config)
    acc = 4 * g.row_tiles * g.col_tiles
    fragments = 0 if g.config.warpgroup else 2 * (4 * g.row_tiles + 2 * g.col_tiles)
    if problem.dtype == "float32":
        fragments += fragment_words(problem.float32, g.row_tiles)
    copies = 0 if g.config.tma else g.a_tile.passes + g.w_tile.passes
    ends = 0 if g.config.tma else g.m_ends * g.a_tile.passes + g.n_ends * g.w_tile.passes
    row_words, matrix_words = operand_words(g.problem.steps, g.problem.dtype)
    row_words *= g.column_parts
    norm_words = g.normed_vectors * VECTOR + 2 * (g.problem.row_norm is not None)
    epilogue = acc + g.passes * matrix_words + row_words + norm_words + 40
    # The norm holds each vector twice: as it was read, and as float32.
    norm = 0 if g.problem.norm is None else g.norm_rows * 12 * g.norm_vectors + 76
    return max(acc + fragments + 28 + copies + ends, epilogue, norm)


def legal(g: GemmGeometry, shared_limit: int) -> bool:
    """Whether tiles divide among warps and threads, and fit shared memory and registers."""
    tiles = g.a_tile, g.w_tile
    divides = all(t.rows % min(t.rows, t.rows_per_pass) == 0 and t.chunks == t.threads_per_row for t in tiles)
    if g.config.warpgroup:
        # Three stages: one that is read, one whose products are under way, one that is copied.
        panels = all(t.dim % PANEL == 0 for t in tiles)
        divides = (divides or g.config.tma) and panels and g.config.warps_m % GROUP_WARPS == 0 and g.config.stages >= 3
        if g.problem.w_layout == "kn" and g.warp_n % PANEL:  # a warpgroup begins with a panel of w
            return False
    if g.config.sets > 1 + g.config.tma:
        return False
    if g.problem.batch > 1:
        # Blocks of k that end past a matrix with rows along k would read the next one.
        fits = g.problem.rows >= g.config.block_m and (g.problem.w_layout == "nk" or not g.k_ends)
        if not fits or g.in_clusters:
            return False
    if g.config.tma and g.problem.norm is not None:
        return False
    # A warp stages 16 columns or more of the result.
    if g.problem.gate is not None and (g.in_clusters or g.warp_n % (4 * GATE_COLUMNS)):
        return False
    # The columns of one pair of statistics lie in neighbouring lanes of one row.
    together = g.config.block_n if g.in_clusters else g.staging_columns
    if g.problem.statistics and together % STATISTICS_COLUMNS:
        return False
    if g.in_clusters:
        each = g.share_passes * g.config.splits * (g.threads - PRODUCER_THREADS)
        has_whole_passes = each * VECTOR == g.config.block_m * g.config.block_n
        if g.config.sets > 1 or g.config.splits not in CLUSTERS or not has_whole_passes:
            return False
        # Addresses of a cluster's shared memory have bits where a descriptor holds the distance between panels.  wgmma
        # reads that distance if w lies along k and has several panels.
        if g.problem.w_layout == "kn" and g.config.block_n > PANEL:
            return False
    if g.tail is not None and not _tail_fits(g, g.tail, shared_limit):
        return False
    return divides and g.shared_bytes <= shared_limit and g.ctas_per_multiprocessor > 0


def _tail_fits(g: GemmGeometry, tail: GemmGeometry, shared_limit: int) -> bool:
    """Whether narrower tiles may follow those of `g` in the same CTAs, and have no more shared memory."""
    problem, config = g.problem, g.config
    alone = config.tma and config.sets == config.splits == 1 and g.ctas_per_multiprocessor == 1
    is_plain = problem.batch == 1 and problem.norm is None and not problem.defers_norm
    # A warp has as much room for its results on their way to memory as the wide tiles need.
    is_narrower = tail.stage_bytes < g.stage_bytes and tail.staging_bytes <= g.staging_bytes
    return alone and is_plain and is_narrower and legal(tail, shared_limit)


def partials_shape(g: GemmGeometry) -> tuple[int, int, int, int]:
    """(tiles * splits, m16n8 tiles of a warp, threads, 4) floats: accumulators as the threads hold them."""
    return g.ctas, g.row_tiles * g.col_tiles, g.threads, 4


def refusal(problem: GemmProblem, takes_float32: bool = False) -> str | None:
    """The reason why no tensor-core kernel computes `problem`, or why none that takes 16 bits does, or None."""
    if problem.dtype == "float32" and not takes_float32:
        return "it computes in float16 or bfloat16, not in float32"
    chunk = chunk_elements(problem.dtype)
    if problem.k % chunk:
        return f"k={problem.k} must be a multiple of {chunk}: rows are copied 16 bytes at a time"
    reads_rows = problem.w_layout == "kn" or any(step.operand in ("matrix", "normed") for step in problem.steps)
    whole = reads_rows or problem.norm is not None or problem.gate is not None or problem.defers_norm
    if problem.n % VECTOR and whole:
        return f"n={problem.n} must be a multiple of {VECTOR}: rows of w, or of an operand, are read {VECTOR} at a time"
    if problem.batch > 1 and problem.rows < MMA_ROWS:
        return f"{problem.batch} products of {problem.rows} rows each, fewer than a tile's {MMA_ROWS}"
    for rows, columns in ((problem.m, problem.k), problem.w_shape, (problem.m, problem.w_columns)):
        if rows * columns >= 2**31:
            return f"a matrix of shape ({rows}, {columns}) has 2^31 elements or more; indices are 32-bit"
    return None


@functools.lru_cache(maxsize=64)
def operand_bytes(problem: GemmProblem) -> int:
    """Bytes of all operands and results, each read or written once."""
    return sum(math.prod(shape) * element_bytes(dtype) for shape, dtype in [*problem.inputs, *problem.outputs])
