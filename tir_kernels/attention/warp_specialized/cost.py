"""Predicted time of the warp-specialized kernel: fitted coefficients of the time model (time_model.py)."""

from tir_kernels.attention.prediction.time_model import Coefficients, Work, predict
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_counts import FineMask

FITTED = Coefficients(
    launch=1.93,
    start=0.0787,
    merge=0.316,
    fill=5.08,
    partial=8.23e-05,
    wait=0.234,
    undisturbed=0.185,
    product=2.08e-07,
    element=2.26e-05,
    part=3.96e-06,
    copy=1.5e-06,
    traffic=1.35e-05,
    warp=0.00757,
    soft=1.46,
    crowded=0.0,
)


# By block_m, block_n and blocks together.  Four blocks together are copied by twice or four times as many instructions
# of one thread (seven masks on an H200, benchmarks/notes).
FACTORS = {(128, 32, 4): 1.08, (64, 32, 4): 1.2}
APART = 1.045  # tokens that are apart: 2 to 5 % longer than predicted (36 dilated masks on an H200, benchmarks/notes)
PRIOR_BLOCKS = 0.4  # reading an earlier part's result takes about as long: other warpgroups multiply meanwhile


def predict_us(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask."""
    return float(predict(work_of(problem, config, fine, gpu), FITTED))


def work_of(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    work = in_tiles(Work.of(g, fine, gpu, g.grid_size(gpu)), config.together)
    if problem.continues:
        work = work.after_a_part(PRIOR_BLOCKS)
    factor = FACTORS.get((config.block_m, config.block_n, config.together), 1.0)
    if config.token_stride > 1:
        factor *= APART
    return work._replace(crowded=0.0, factor=factor)  # its CTAs fill all places in any case


def in_tiles(work: Work, together: int) -> Work:
    """The same with `together` blocks as one: on average half of a row's last tile is blocks that were added."""
    added = (together - 1) / 2
    larger = {name: getattr(work, name) * together for name in ("elements", "products", "copies")}
    rows = work.busiest_ctas * work.multiprocessors  # about
    return work._replace(
        blocks=(work.blocks + added * rows) / together,
        busiest=(work.busiest + added * work.busiest_ctas) / together,
        chain=(work.chain + added * work.links) / together,
        longest_split=(work.longest_split + added * (work.splits > 0)) / together,
        **larger,
    )
