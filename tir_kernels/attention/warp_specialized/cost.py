"""Predicted time of the warp-specialized kernel: fitted coefficients of the time model (time_model.py)."""

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.time_model import Coefficients, Work, predict
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_counts import FineMask

FITTED = Coefficients(
    launch=3.25,
    start=1e-09,
    merge=0.335,
    fill=2.37,
    partial=0.000223,
    wait=0.288,
    undisturbed=0.355,
    product=1.98e-07,
    element=1.82e-05,
    part=4.93e-06,
    copy=1e-09,
    traffic=1.16e-05,
    warp=1e-09,
    soft=1.4,
    idle=1.08,
)


def predict_us(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask."""
    return float(predict(work_of(problem, config, fine, gpu), FITTED))


def work_of(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    return Work.of(g, fine, gpu, g.grid_size(gpu))
