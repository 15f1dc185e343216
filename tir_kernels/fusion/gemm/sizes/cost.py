"""Predicted time of the CUDA matrix-product kernels, from sizes and the architecture: nothing is measured.

A multiprocessor runs `resident` CTAs, each of which walks the blocks of its range of k one after the other:

    work     = products and shared-memory traffic, each at its own rate, µs of a multiprocessor
    latency  = waiting, or the time of a copy from memory / copies that are under way
    block    = max(work, latency / resident)         with many CTAs work hides latency, with few it cannot
    wave     = resident * (blocks * block + elements of the tile * epilogue) + start

CTAs run in waves; the last wave may have fewer residents.  Added to the waves are

    merge    = where k is split: the arrival, and all splits' partial sums read by the last CTA
    norm     = where there is one: the arrival, and the batches of rows that a warp normalises one after the other
    memory   = bytes of all operands / bandwidth
    time     = launch + max(waves + merge + norm, memory)

With copies by the tensor memory accelerator a multiprocessor has `rounds` tiles, one after another, and

    block    = max(products and what they read of shared memory, waiting, the time of a copy / stages)
    tile     = blocks * block * the tile's rate + elements of a warp * epilogue
    waves    = rounds * tile + start

Rounds of wide tiles and of narrower ones after them (`waves.py`) have a tile's time each.  If there is one round only,
of tiles of 128 × 256, nothing hides their stores, and it takes `alone` times as long.  If CTAs or sets of warps
take turns, a tile takes half of that, but no less than its products.  If a tile's splits are a cluster, each of its
CTAs has a share of the epilogue, and merge is the wait for the other CTAs and the reading of all splits' sums of that
share.

Several CTAs may read the same part of the larger operand before it is in the L2 cache: a share of these reads is added
to memory.

Maxima are soft (p-norms).  The coefficients were fitted to an H200; other architectures scale with their number of
multiprocessors and bandwidth, so there only the order of configurations counts.
"""

import functools
from dataclasses import dataclass, field, replace

from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.float32.modes import mma_time
from tir_kernels.cuda.shared_tiles import MMA_ROWS
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import (
    FLOAT_BYTES,
    GROUP_M,
    GROUP_WARPS,
    GemmGeometry,
    operand_bytes,
)
from tir_kernels.fusion.gemm.sizes.waves import parts, tail_turns
from tir_kernels.fusion.problem import GemmProblem, Step

TIMED_ALONE = 128 * 256  # results of the tiles of which single waves were timed beside others
TMA_WARPS = 8  # of a tile, for which `element` holds where a tile's warps store one part after another


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the time model, in µs; the module's docstring explains them."""

    launch: float
    start: float
    product: float  # for each multiply-add
    shared: float  # for each byte that goes to shared memory or that a warp reads from it; with TMA, that it reads
    wait: float  # latency of a block
    copy: float  # latency of a copy
    element: float  # of the epilogue, for each element
    merge: float  # of splits, besides the reading of their sums
    read: float  # for each byte of partial sums that the last CTA reads back
    norm: float  # of a second phase, besides its batches
    batch: float  # for each batch of rows that a warp normalises together
    soft: float  # p
    again: float = 0.0  # the share of the memory's time when a further CTA reads what another has just asked for
    rates: dict = field(default_factory=dict)  # (block_m, block_n, warps, sets): a tile's time over the model's
    two_widths: float = 1.0  # time of waves of wide and of narrower tiles over the model's
    alone: float = 1.0  # time of a single wave of tiles of 128 × 256 over the model's: all store at the same time
    hidden: float = 0.0  # the share of an epilogue beside other warps' products, where sets of warps are not counted


# Fitted to 434 times at 42 problems on an H200 (128 to 32768 rows; BERT's and LLaMA's products, with and without
# LayerNorm).  A model fitted to half of the problems was tested on the other half.  Its choice among the timed
# configurations is 1.8 % slower than the best of them in the geometric mean, 18 % at worst (halves exchanged: 0.6 %,
# 9 %); its predictions are 8 % off (root mean square).  Untimed configurations come after timed ones in every list.
FITTED = Coefficients(
    launch=0.262,
    start=2.14,
    product=3.49e-7,
    shared=1.78e-6,
    wait=0.0568,
    copy=0.485,
    element=8.46e-5,
    merge=0.885,
    read=1.46e-5,
    norm=1.44,
    batch=1.21,
    soft=1.63,
)
# Fitted to 51 times of wgmma with copies by cp.async at 31 problems on an H200 (128 to 32768 rows); fast ones have more
# weight.  Norms were not timed.
FITTED_WGMMA = replace(
    FITTED,
    start=0.978,
    product=4.68e-7,
    shared=1.50e-6,
    wait=0.0124,
    copy=0.298,
    element=1.45e-4,
    merge=1.37,
    read=1.56e-5,
    soft=1.53,
)
# Fitted to times of wgmma with copies by the tensor memory accelerator on an H200 (`benchmarks/fit_gemm_model.py`): at
# 44 products between copies, as in models.  Most others were timed one after another, where a GPU that multiplies
# without a pause is at its power limit and tiles have another order; from 4096 rows on they hardly count.  The choice
# is 1.7 % slower than the best in the geometric mean of the 44, 10 % at worst, and fitted to each half of the problems
# in turn as much on the other half.  The rate of two sets of 128 × 128 was lowered by 4 % for 30 products of random
# rows, to which nothing else was fitted: there the choice is 1.7 % slower, 8 % at worst.  The rate of 64 × 32 is such
# that products of up to 32 columns take it, where it was the fastest, and no others.  `launch` is not fitted: with it
# one kernel of two products is taken where it was measured to be faster, and only there.
FITTED_TMA = replace(
    FITTED,
    launch=0.8,
    start=1.62,
    product=2.9e-7,
    shared=1.63e-6,
    wait=0.118,
    copy=0.483,
    element=5.3e-5,
    merge=0.0123,
    read=6.64e-5,
    soft=2.11,
    again=0.0756,
    two_widths=1.01,
    alone=1.024,
    rates={
        (64, 32, 4, 1): 0.95,
        (64, 64, 4, 1): 1.108,
        (64, 128, 4, 1): 0.889,
        (64, 160, 4, 2): 0.969,
        (64, 192, 4, 2): 0.964,
        (64, 192, 8, 1): 1.008,
        (64, 256, 4, 2): 0.966,
        (64, 256, 8, 1): 0.986,
        (128, 64, 8, 1): 0.92,
        (128, 96, 8, 1): 1.026,
        (128, 112, 4, 2): 0.93,
        (128, 128, 4, 1): 0.889,
        (128, 128, 4, 2): 0.88,
        (128, 128, 8, 1): 0.983,
        (128, 160, 8, 1): 1.073,
        (128, 192, 8, 1): 0.987,
        (128, 256, 8, 1): 0.995,
        (192, 96, 4, 2): 0.993,
        (192, 128, 12, 1): 1.06,
        (192, 192, 12, 1): 1.054,
        (256, 128, 8, 1): 1.076,
    },
)
# The same for clusters and for products of groups of rows, which were timed before the model counted warps and what
# they read: their choices stay those that were measured.
FITTED_TMA_BEFORE = replace(
    FITTED,
    start=2.04,
    product=3.42e-7,
    shared=0.0,
    wait=0.116,
    copy=0.377,
    element=5.05e-5,
    merge=0.0171,
    read=5.19e-5,
    soft=1.77,
    again=0.156,
    hidden=0.5,
)
# Two CTAs of a cluster on a tile of 128 × 192 read less from the L2 cache than other tiles of narrow, deep products:
# 35.7 µs at 8,000 × 192 × 6,288, where the tile of 64 × 192, whose rate this is fitted beside, takes 42.3.
FITTED_CLUSTERS = replace(FITTED_TMA_BEFORE, rates={(128, 192, 8, 1): 0.72})


# The gemv kernel's start, the share of the bandwidth that it reaches with one row, and the share of the memory's time
# that each further row adds.  Predictions are off by 37 % at worst from the default configuration's times on an H200
# (1, 8 and 16 rows, n and k from 768 to 11008).
GEMV_START_US, GEMV_REACHED, GEMV_ROW = 1.8, 0.9, 0.008


def fitted(config: GemmConfig, groups: bool = False) -> Coefficients:
    """The coefficients of a configuration's instructions: mma.sync, wgmma, or wgmma with copies by TMA."""
    if config.tma and config.splits > 1:
        return FITTED_CLUSTERS
    if config.tma:
        return FITTED_TMA_BEFORE if groups else FITTED_TMA
    return FITTED_WGMMA if config.warpgroup else FITTED


# (microseconds a tile to read statistics of rows, microseconds a tile to write them)
DEFERRED, DEFERRED_CLUSTER, DEFERRED_TMA = (0.45, 0.2), (0.15, 0.1), (1.5, 0.9)


@functools.lru_cache(maxsize=1 << 15)  # lists of configurations are sorted by this time, then a search asks again
def predict_gemm_us(problem, config, gpu: GPU, groups: bool = False) -> float:
    """Predicted microseconds of the gemm or gemm-norm kernel; with `groups`, of a grouped one with as many rows."""
    extra_us = 0.0
    if problem.defers_norm:
        extra_us = deferral_us(GemmGeometry(problem, config), gpu.multiprocessors)
        problem = plain_product(problem)
    return extra_us + Model(GemmGeometry(problem, config), gpu).us(fitted(config, groups))


def deferral_us(g: GemmGeometry, multiprocessors: int) -> float:
    """Microseconds that statistics of rows add to a product: a CTA waits for the epilogue of each of its tiles.

    The cost is hidden best in a cluster and with copies by cp.async.  Rounded from times on an H200
    (`benchmarks/notes/fusion.md`).
    """
    reads, writes = DEFERRED_CLUSTER if g.in_clusters else DEFERRED_TMA if g.config.tma else DEFERRED
    tiles = -(-g.ctas // multiprocessors)
    return tiles * (reads * (g.problem.row_norm is not None) + writes * g.problem.statistics)


def plain_product(problem: GemmProblem) -> GemmProblem:
    """The product without deferred norms: a normed operand is only added."""
    steps = tuple(step if step.norm is None else Step("add", "matrix") for step in problem.steps)
    return replace(problem, steps=steps, a_norm=None, statistics=False)


def tile_of(config: GemmConfig) -> tuple[int, int, int, int]:
    """What `Coefficients.rates` is keyed by."""
    return config.block_m, config.block_n, config.warps, config.sets


class Model:
    """The quantities, apart from the coefficients, that the prediction needs; they are counted once."""

    def __init__(self, g: GemmGeometry, gpu: GPU):
        config = self.config = g.config
        fits = min(g.ctas_per_multiprocessor, gpu.ctas_that_share(g.shared_bytes))
        slots = max(1, fits) * gpu.multiprocessors
        self.full_waves, rest = divmod(g.ctas, slots)
        self.resident = max(1, fits)
        self.last_resident = -(-rest // gpu.multiprocessors)
        self.tiles = -(-g.ctas // gpu.multiprocessors)
        self.tail: Model | None = None
        if config.tail_n:
            head, *narrower = parts(g, slots)
            for part in narrower:
                self.tiles = -(-head.tiles // slots)
                self.tail = Model(part.g, gpu)
                self.tail.tiles = tail_turns(head, part, slots)
        self.blocks = g.blocks_per_split
        self.products = config.block_m * config.block_n * config.block_k
        self.products *= mma_time(g.problem.dtype, g.problem.float32)
        readers = config.warps
        rows = g.warp_m
        if config.warpgroup:  # an instruction reads 64 rows of a and all columns
            readers, rows = config.warps // GROUP_WARPS * g.row_tiles, GROUP_WARPS * MMA_ROWS
        self.reads = readers * (rows + g.warp_n) * config.block_k * g.element_bytes
        self.shared = self.reads + g.stage_bytes
        self.ahead = min(config.stages - 1, self.blocks)
        self.elements: float = config.block_m * config.block_n
        self.splits = config.splits
        self.merged: float = config.splits * self.elements * FLOAT_BYTES if config.splits > 1 else 0
        if g.in_clusters:
            self.elements /= config.splits
            self.merged /= config.splits
        self.batches = 0 if g.problem.norm is None else config.block_m // config.warps // g.norm_rows
        self.memory = operand_bytes(g.problem) / gpu.bandwidth
        # The CTAs of a group of tiles read the same part of the larger operand.
        readers = min(g.n_tiles if g.problem.m > g.problem.w_columns else g.m_tiles, GROUP_M)
        larger = max(g.problem.m, g.problem.w_columns) * g.problem.k * g.element_bytes
        self.shared_reads = larger * (readers - 1) / gpu.bandwidth

    def us(self, c: Coefficients) -> float:
        """Predicted microseconds; see the module's description."""
        if self.config.tma:
            is_single = self.tiles == self.resident == self.config.sets == 1 and self.tail is None
            waves = self._rounds(c) * (c.alone if is_single and self.elements == TIMED_ALONE else 1.0) + c.start
            return c.launch + soft_max(c.soft, waves, self.memory + c.again * self.shared_reads)
        work = c.product * self.products + c.shared * self.shared
        latency = soft_max(c.soft, c.wait, c.copy / self.ahead)

        def wave(resident: int) -> float:
            if resident == 0:
                return 0.0
            block = soft_max(c.soft, work, latency / resident)
            return resident * (self.blocks * block + c.element * self.elements) + c.start

        waves = self.full_waves * wave(self.resident) + wave(self.last_resident)
        second = (c.merge + c.read * self.merged) * (self.splits > 1)
        second += (c.norm + c.batch * self.batches) * (self.batches > 0)
        return c.launch + soft_max(c.soft, waves + second, self.memory)

    def _rounds(self, c: Coefficients) -> float:
        together = min(self.resident * self.config.sets, self.tiles)
        work = c.product * self.products + c.shared * self.reads
        products = self.blocks * soft_max(c.soft, work, c.wait, c.copy / self.config.stages)
        products *= c.rates.get(tile_of(self.config), 1.0)
        epilogue = c.element * self.elements
        if c.hidden:
            tile = products + epilogue * (1 - c.hidden * (together > 1))
        else:
            tile = products + epilogue * TMA_WARPS / self.config.warps
            if together > 1:
                tile = soft_max(c.soft, products, tile / 2)
        merge = (c.merge + c.read * self.merged) * (self.splits > 1)
        wide = self.tiles * (tile + merge)
        return wide if self.tail is None else c.two_widths * (wide + self.tail._rounds(c))


def predict_gemv_us(problem, gpu: GPU) -> float:
    """Predicted microseconds of the gemv kernel in its default configuration: its start, and the memory it touches."""
    memory = operand_bytes(problem) / (GEMV_REACHED * gpu.bandwidth)
    return GEMV_START_US + memory * (1 + GEMV_ROW * (problem.m - 1))


def soft_max(p: float, *terms: float) -> float:
    """The p-norm of some times: a maximum with soft corners."""
    return sum(x**p for x in terms) ** (1 / p)
