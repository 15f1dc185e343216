"""Predicted time of the warp-specialized kernel: fitted coefficients of the time model (time_model.py)."""

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.time_model import Coefficients, Work, predict
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_counts import FineMask

FITTED = Coefficients(
    launch=3.98,
    start=0.15,
    merge=0.346,
    partial=0.00018,
    wait=0.0489,
    undisturbed=1.05,
    product=1.66e-08,
    element=1.94e-05,
    part=4.1e-06,
    copy=1.59e-05,
    traffic=1.43e-10,
    warp=0.0164,
    soft=1.77,
    idle=0.99,
)


def predict_us(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask."""
    return float(predict(work_of(problem, config, fine, gpu), FITTED))


def work_of(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    return Work.of(g, fine, gpu, g.grid_size(gpu))
