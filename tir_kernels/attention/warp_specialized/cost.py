"""Predicted time of the warp-specialized kernel: fitted coefficients of the time model (time_model.py)."""

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.time_model import Coefficients, Work, predict
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_counts import FineMask

FITTED = Coefficients(
    launch=1.54,
    start=0.546,
    merge=0.303,
    fill=5.72,
    partial=0.000149,
    wait=0.169,
    undisturbed=0.246,
    product=2.36e-07,
    element=1.76e-05,
    part=4.19e-06,
    copy=1e-09,
    traffic=1.74e-05,
    warp=0.0159,
    soft=1.59,
    idle=0.542,
    crowded=0.0,
)


# By block_m, block_n and blocks together.  Tiles of 64 × 128 are predicted too fast where few CTAs run; 64 × 64 or the
# block-wise kernel is up to a third faster there.  From 1.03 to 1.06 the choices are the same.  Four blocks together
# are copied by twice or four times as many instructions of one thread (seven masks on an H200, benchmarks/notes).
# 192 × 128 is predicted too slow where rows are long; below 0.97 it is chosen where each CTA has a single row, too.
FACTORS = {(192, 128, 1): 0.97, (64, 128, 1): 1.05, (128, 32, 4): 1.08, (64, 32, 4): 1.2}


def predict_us(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask."""
    return float(predict(work_of(problem, config, fine, gpu), FITTED))


def work_of(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    work = in_tiles(Work.of(g, fine, gpu, g.grid_size(gpu)), config.together)
    # Its CTAs fill all places in any case.
    return work._replace(crowded=0.0, factor=FACTORS.get((config.block_m, config.block_n, config.together), 1.0))


def in_tiles(work: Work, together: int) -> Work:
    """The same with `together` blocks as one: on average half of a row's last tile is blocks that were added."""
    added = (together - 1) / 2
    larger = {name: getattr(work, name) * together for name in ("elements", "products", "copies")}
    return work._replace(
        blocks=(work.blocks + added * work.ctas) / together, longest=(work.longest + added) / together, **larger
    )
