"""The tile configurations of the CUDA matrix-product kernels that are worth compiling for a problem."""

import functools
from dataclasses import replace

from tir_kernels.cuda.device import GPU, gpu_of, has_wgmma
from tir_kernels.cuda.shared_tiles import PANEL
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import CLUSTERS, GROUP_WARPS, GemmGeometry, legal
from tir_kernels.fusion.gemm.sizes.waves import may_have_tail
from tir_kernels.fusion.problem import GemmProblem

# (block_m, block_n, warps_m, warps_n).  Wide tiles read less memory; with narrow ones, small products fill the GPU.
TILES = (
    (16, 64, 1, 4),
    (16, 128, 1, 4),
    (32, 64, 1, 4),
    (32, 128, 1, 4),
    (64, 64, 2, 2),
    (64, 64, 2, 4),
    (64, 128, 2, 2),
    (64, 128, 2, 4),
    (96, 128, 2, 2),
    (128, 64, 2, 2),
    (128, 64, 4, 2),
    (128, 128, 2, 2),
    (64, 256, 1, 4),
    (128, 128, 2, 4),
    (128, 256, 2, 4),
    (192, 128, 4, 2),
    (256, 128, 4, 2),
    (128, 96, 2, 2),
    (128, 192, 2, 4),
)
# The same for warpgroups, of four warps along m each.
WARPGROUP_TILES = (
    (64, 64, 4, 1),
    (64, 128, 4, 1),
    (64, 256, 4, 2),
    (128, 64, 8, 1),
    (128, 128, 8, 1),
    (128, 256, 8, 1),
)
# (block_m, block_n, warps_m, warps_n, sets) where the tensor memory accelerator copies.
TMA_TILES = (
    (64, 64, 4, 1, 1),
    (64, 128, 4, 1, 1),
    (64, 256, 4, 2, 1),
    (128, 64, 8, 1, 1),
    (128, 128, 4, 1, 1),
    (128, 128, 8, 1, 1),
    (128, 256, 8, 1, 1),
    (256, 128, 8, 1, 1),
    (64, 64, 4, 1, 2),
    (64, 128, 4, 1, 2),
    (64, 256, 4, 1, 2),
    (128, 128, 4, 1, 2),
    # With these, BERT's and LLaMA's products have whole waves of tiles: 768, 2304, 2816, 3072 and 11008 columns.
    (64, 192, 4, 2, 1),
    (128, 96, 8, 1, 1),
    (128, 192, 8, 1, 1),
    (128, 112, 4, 1, 2),
    (192, 96, 4, 1, 2),
    # With these, those of 384, 640, 768 and 1152 columns with rows that powers of two do not divide.
    (128, 160, 8, 1, 1),
    (192, 128, 12, 1, 1),
    (192, 192, 12, 1, 1),
    (64, 160, 4, 1, 2),
    (64, 192, 4, 1, 2),
    (64, 32, 4, 1, 1),
)
# Columns of the tiles that may follow whole waves of those of TMA_TILES (`waves.py`).  None follow 256 × 128: there
# ptxas serializes the products.
TAILS = {
    (128, 256, 8, 1): (64, 96, 128, 160, 192),
    (128, 192, 8, 1): (64, 96, 128),
    (128, 160, 8, 1): (96,),
    (192, 192, 12, 1): (64, 96, 128),
    (192, 128, 12, 1): (64, 96),
}
# Tiles whose sums a cluster of CTAs shares, if k is split.
CLUSTER_TILES = ((64, 64, 4, 1), (64, 128, 4, 1), (128, 128, 8, 1), (128, 192, 8, 1))
# (block_m, block_n, block_k, warps_m, warps_n, stages, splits), each within 2 % of the fastest somewhere in the sweeps
# that the time model was fitted to.  Defaults come from these lists, because the model cannot judge other tiles.
_MMA = (
    (16, 64, 64, 1, 4, 6, 1),
    (16, 128, 64, 1, 4, 4, 4),
    (32, 64, 64, 1, 4, 4, 1),
    (32, 128, 64, 1, 4, 4, 1),
    (64, 64, 64, 2, 2, 3, 1),
    (64, 64, 64, 2, 2, 4, 1),
    (64, 64, 64, 2, 2, 4, 2),
    (64, 64, 64, 2, 2, 4, 4),
    (64, 64, 64, 2, 2, 5, 1),
    (64, 64, 64, 2, 2, 6, 1),
    (64, 64, 64, 2, 2, 6, 4),
    (64, 64, 64, 2, 2, 12, 1),
    (64, 64, 64, 2, 4, 5, 1),
    (64, 128, 64, 2, 4, 4, 1),
    (64, 128, 64, 2, 4, 4, 2),
    (64, 128, 64, 2, 4, 6, 2),
    (96, 128, 64, 2, 2, 3, 1),
    (128, 128, 32, 2, 2, 3, 1),
    (128, 128, 32, 2, 2, 4, 1),
    (128, 128, 64, 2, 2, 3, 1),
    (128, 128, 64, 2, 4, 3, 1),
    (128, 128, 64, 2, 4, 5, 4),
    (128, 96, 64, 2, 2, 4, 1),
    (128, 192, 64, 2, 4, 3, 1),
    (128, 256, 64, 2, 4, 3, 1),
    (256, 128, 64, 4, 2, 3, 1),
)
# The same for wgmma, within 10 %: with copies by cp.async (_WGMMA); with copies by the tensor memory accelerator for
# one set of warps (_TMA), for clusters and for two sets.
_WGMMA = (
    (64, 64, 64, 4, 1, 6, 1),
    (64, 64, 64, 4, 1, 12, 1),
    (64, 64, 64, 4, 1, 6, 2),
    (64, 64, 64, 4, 1, 6, 4),
    (64, 64, 64, 4, 1, 6, 8),
    (64, 128, 64, 4, 1, 4, 1),
    (64, 256, 64, 4, 2, 5, 1),
    (128, 128, 64, 8, 1, 3, 1),
    (128, 128, 64, 8, 1, 6, 1),
    (128, 128, 64, 8, 1, 6, 4),
    (128, 256, 64, 8, 1, 4, 1),
)
_TMA = (
    (64, 64, 64, 4, 1, 6),
    (64, 64, 64, 4, 1, 12),
    (64, 128, 64, 4, 1, 4),
    (64, 256, 64, 4, 2, 5),
    (128, 64, 64, 8, 1, 8),
    (128, 128, 64, 4, 1, 3),
    (128, 128, 64, 8, 1, 6),
    (128, 256, 64, 8, 1, 4),
    (256, 128, 64, 8, 1, 4),
    (64, 192, 64, 4, 2, 6),
    (128, 96, 64, 8, 1, 6),
    (128, 192, 64, 8, 1, 5),
)
_CLUSTERS = (
    (64, 64, 64, 4, 1, 5, 2),
    (64, 64, 64, 4, 1, 5, 4),
    (64, 128, 64, 4, 1, 6, 2),
    (128, 192, 64, 8, 1, 5, 2),
)
_TMA_SETS = ((128, 128, 64, 4, 1, 6), (64, 256, 64, 4, 1, 4), (128, 112, 64, 4, 1, 6))
# Those that were timed with one matrix of w only, not with groups of rows that have one each.
_TMA_ONE_MATRIX = ((128, 160, 64, 8, 1, 6), (192, 128, 64, 12, 1, 4), (192, 192, 64, 12, 1, 4), (64, 32, 64, 4, 1, 8))
_TMA_SETS_ONE_MATRIX = ((64, 160, 64, 4, 1, 7), (64, 192, 64, 4, 1, 6), (192, 96, 64, 4, 1, 6))
MEASURED_WITH_GROUPS = frozenset(
    [GemmConfig(*sizes) for sizes in _MMA]
    + [GemmConfig(*sizes, warpgroup=True) for sizes in _WGMMA]
    + [GemmConfig(*sizes, warpgroup=True, tma=True) for sizes in _TMA]
    + [GemmConfig(*sizes, warpgroup=True, tma=True) for sizes in _CLUSTERS]
    + [GemmConfig(*sizes, warpgroup=True, tma=True, sets=2) for sizes in _TMA_SETS]
)
MEASURED = (
    MEASURED_WITH_GROUPS
    | {GemmConfig(*sizes, warpgroup=True, tma=True) for sizes in _TMA_ONE_MATRIX}
    | {GemmConfig(*sizes, warpgroup=True, tma=True, sets=2) for sizes in _TMA_SETS_ONE_MATRIX}
)
MEASURED |= {replace(c, tail_n=n) for c in MEASURED if c.tma and c.splits == c.sets == 1 for n in TAILS.get(c.tile, ())}
BLOCK_K = (32, 64)
STAGES = (2, 3, 4, 5, 6, 7, 8, 12)
# The same in float32, whose elements are twice as large: tiles that spill no register in either mode.  None was timed:
# the time model ranks them all.
FLOAT32_TILES = (
    (16, 64, 1, 4),
    (16, 128, 1, 4),
    (32, 64, 1, 4),
    (64, 64, 2, 2),
    (64, 64, 2, 4),
    (64, 128, 2, 2),
    (64, 128, 2, 4),
    (128, 64, 4, 2),
)
FLOAT32_BLOCK_K = (16, 32)
FLOAT32_STAGES = (2, 3, 4, 6)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
MIN_BLOCKS = 2  # of k in a split
# (block_m, block_n, warps_m, warps_n): the most splits whose sums the last CTA adds without spilling registers, as nvcc
# 13.0 compiles them for sm_80, or for sm_90a where warps multiply in groups.
MOST_SPLITS = {
    (32, 128, 1, 4): 6,
    (64, 64, 2, 2): 4,
    (64, 128, 2, 2): 3,
    (64, 128, 2, 4): 4,
    (96, 128, 2, 2): 3,
    (128, 64, 2, 2): 2,
    (128, 64, 4, 2): 4,
    (128, 128, 2, 2): 2,
    (64, 256, 1, 4): 2,
    (128, 128, 2, 4): 4,
    (128, 256, 2, 4): 2,
    (192, 128, 4, 2): 3,
    (256, 128, 4, 2): 2,
    (64, 64, 4, 1): 8,
    (64, 128, 4, 1): 3,
    (64, 256, 4, 2): 4,
    (128, 128, 8, 1): 4,
    (128, 256, 8, 1): 2,
}
# The same where the product reads or writes statistics of rows, if it is less.
MOST_SPLITS_DEFERRED = {(96, 128, 2, 2): 2, (128, 128, 2, 2): 1, (192, 128, 4, 2): 2, (256, 128, 4, 2): 1}
FULL_GPU = 2  # tiles for each multiprocessor; with as many or more, splitting k gains nothing


def legal_configs(problem: GemmProblem, target) -> list[GemmConfig]:
    """Every configuration of these tiles that fits the target, leaves each split some work and spills no register."""
    limit = int(target.attrs["max_shared_memory_per_block"])
    return list(_legal_configs(problem, gpu_of(target), limit, has_wgmma(target)))


@functools.lru_cache(maxsize=64)  # support, spaces and defaults of one problem ask for it
def _legal_configs(problem: GemmProblem, gpu: GPU, limit: int, for_warpgroups: bool) -> tuple[GemmConfig, ...]:
    is_float32 = problem.dtype == "float32"
    candidates = [
        GemmConfig(block_m, block_n, block_k, warps_m, warps_n, stages)
        for block_m, block_n, warps_m, warps_n in (FLOAT32_TILES if is_float32 else TILES)
        for block_k in (FLOAT32_BLOCK_K if is_float32 else BLOCK_K)
        for stages in (FLOAT32_STAGES if is_float32 else STAGES)
    ]
    if for_warpgroups and not is_float32:
        candidates += [
            GemmConfig(block_m, block_n, PANEL, warps_m, warps_n, stages, warpgroup=True)
            for block_m, block_n, warps_m, warps_n in WARPGROUP_TILES
            for stages in STAGES
        ]
        candidates += [
            GemmConfig(block_m, block_n, PANEL, warps_m, warps_n, stages, warpgroup=True, tma=True, sets=sets)
            for block_m, block_n, warps_m, warps_n, sets in TMA_TILES
            for stages in STAGES
        ]
    geometries = (GemmGeometry(problem, config) for config in candidates)
    found = [replace(g.config, splits=s) for g in geometries if legal(g, limit) for s in splits_of(g, gpu)]
    # Not every tile divides among the threads of a cluster.
    found = [c for c in found if not (c.tma and c.splits > 1) or legal(GemmGeometry(problem, c), limit)]
    measured = [GemmGeometry(problem, c) for c in found if c in MEASURED and c.tile in TAILS]
    found += [
        replace(g.config, tail_n=n) for g in measured for n in TAILS[g.config.tile] if may_have_tail(g, n, gpu, limit)
    ]
    return tuple(config for config in found if not spills(config, problem))


def spills(config: GemmConfig, problem: GemmProblem) -> bool:
    """Whether a kernel of this configuration needs more registers than a thread has."""
    tile = config.tile
    if problem.statistics and problem.row_norm is not None and config.warpgroup:
        # Sums, residual, columns and statistics of several rows are in registers at the same time.
        if not config.tma or tile == (128, 256, 8, 1):
            return True
    if config.tma:
        return False
    most = MOST_SPLITS.get(tile, SPLITS[-1])
    if problem.defers_norm:
        most = min(most, MOST_SPLITS_DEFERRED.get(tile, most))
    return config.splits > most or (*tile, config.block_k) == (128, 64, 2, 2, 32)


def by_time(configs: list[GemmConfig], predict, measured: bool = True) -> list[GemmConfig]:
    """The configurations with the measured ones first, sorted by `predict(config)`; the rest keeps its order.

    If none was `measured`, as in float32, all are sorted.
    """
    if not measured:
        return sorted(configs, key=predict)
    first = sorted((c for c in configs if c in MEASURED), key=predict)
    return first + [c for c in configs if c not in MEASURED]


def splits_of(g: GemmGeometry, gpu: GPU) -> list[int]:
    """The numbers of splits that are worth trying: none leaves a split empty, and products of many tiles get only 1."""
    enough = FULL_GPU * gpu.multiprocessors
    if g.config.sets > 1 or g.m_tiles * g.n_tiles >= enough:
        return [1]
    found = [s for s in SPLITS if s == 1 or _even(g.k_blocks, s)]
    if not g.config.tma:
        return found
    clusters = CLUSTERS if g.config.tile in CLUSTER_TILES else ()
    # Large tiles are split for products that have not one for every second multiprocessor.
    most = enough if g.config.warps == GROUP_WARPS else gpu.multiprocessors
    return [s for s in found if s == 1 or s in clusters and g.m_tiles * g.n_tiles * s <= most]


def _even(k_blocks: int, splits: int) -> bool:
    per_split = -(-k_blocks // splits)
    return per_split >= MIN_BLOCKS and -(-k_blocks // per_split) == splits
