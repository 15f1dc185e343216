"""Predicted time of the CUDA block-wise and row-wise kernels: the tiles that are compared, and fitted coefficients.

time_model.py has the formula; docs/attention_model.md explains how the coefficients were fitted and how good they are.
They are an H200's; other architectures scale with their number of multiprocessors and bandwidth, so there only the
order of configurations counts.
"""

from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.block_wise.work import ctas_at_once
from tir_kernels.attention.prediction.time_model import Coefficients, Work, predict
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.shared_tiles import element_bytes
from tir_kernels.masks.block_counts import FineMask
from tir_kernels.masks.block_sparse import BlockSparseMask

# (block_m, block_n, warps): the best of these is at most 4 % slower than the best of all at any point of the grid on an
# H200, and each is the fastest somewhere.
TILES = (
    (64, 64, 4), (64, 32, 4), (64, 128, 4), (128, 64, 4), (128, 32, 4),
    (64, 64, 2), (64, 32, 2), (32, 64, 2), (32, 32, 2), (16, 32, 1),
)  # fmt: skip


# The same for wgmma.
WARPGROUP_TILES = ((64, 64, 4), (64, 32, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))

# Fitted by benchmarks/fit_attention_model.py to benchmarks/results/nvidia-h200/configurations.json.
FITTED = Coefficients(
    launch=2.45,
    start=1e-09,
    merge=0.334,
    fill=1e-09,
    partial=0.000267,
    wait=0.254,
    undisturbed=0.748,
    product=3.66e-07,
    element=1.9e-05,
    part=9.93e-06,
    copy=1.17e-05,
    traffic=1e-09,
    warp=1e-09,
    soft=1.36,
    crowded=0.634,
)
FITTED_WARPGROUP = Coefficients(
    launch=2.15,
    start=1e-09,
    merge=0.33,
    fill=1e-09,
    partial=0.000187,
    wait=0.365,
    undisturbed=0.836,
    product=2.4e-07,
    element=1.97e-05,
    part=2.7e-06,
    copy=1e-09,
    traffic=9.75e-06,
    warp=0.000504,
    soft=1.27,
    crowded=0.61,
)

# wgmma with heads of 129 to 192 takes so many times as long as is predicted (12 points near the best on an H200; the
# cause was not found out).
WIDE_HEADS, WIDE_HEADS_FACTOR = range(129, 193), 1.12

PRIOR_BLOCKS = 1.0  # reading an earlier part's result takes about as long (far parts of strided masks, on an H200)

# For the row-wise kernel: launch, first loads and merge, and the share of the memory's bandwidth that it reaches.
ROW_WISE_START_US = 6.0
REACHED_BANDWIDTH = 0.9


def shortlist(configs: list[BlockWiseConfig]) -> list[BlockWiseConfig]:
    """The configurations that fit and are worth predicting: the usual tiles with two stages, else the default."""
    return [c for c in configs if c.stages == 2 and is_candidate(c)] or configs[:1]


def is_candidate(config: BlockWiseConfig) -> bool:
    """Whether the tile is one of `TILES`, or of `WARPGROUP_TILES` for wgmma."""
    tiles = WARPGROUP_TILES if config.warpgroup else TILES
    return (config.block_m, config.block_n, config.warps) in tiles


def predict_us(problem: AttentionProblem, config: BlockWiseConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask whose tokens are in the configuration's order."""
    coefficients = FITTED_WARPGROUP if config.warpgroup else FITTED
    return float(predict(work_of(problem, config, fine, gpu), coefficients))


def work_of(problem: AttentionProblem, config: BlockWiseConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    work = Work.of(g, fine, gpu, ctas_at_once(config.block_m, gpu))
    if problem.continues:
        work = work.after_a_part(PRIOR_BLOCKS)
    is_wide = config.warpgroup and problem.head_dim in WIDE_HEADS
    return work._replace(factor=WIDE_HEADS_FACTOR) if is_wide else work


def predict_row_wise_us(problem: AttentionProblem, mask: BlockSparseMask, gpu: GPU) -> float:
    """Predicted microseconds of the row-wise kernel: its start, and keys and values of listed blocks read once."""
    tokens = mask.block_density * problem.kv_len * problem.batch * problem.kv_heads
    bytes_read = tokens * (problem.head_dim + problem.v_head_dim) * element_bytes(problem.dtype)
    return ROW_WISE_START_US + bytes_read / (REACHED_BANDWIDTH * gpu.bandwidth)
