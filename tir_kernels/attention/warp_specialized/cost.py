"""Predicted time of the warp-specialized kernel: fitted coefficients of the time model (time_model.py)."""

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.time_model import Coefficients, Work, predict
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.cuda.device import GPU
from tir_kernels.masks.block_counts import FineMask

FITTED = Coefficients(
    launch=4.0,
    start=2.0,
    merge=0.05,
    partial=0.000277,
    wait=0.06,
    undisturbed=1.7,
    product=3.7e-07,
    element=1.0e-05,
    part=5.5e-06,
    copy=3.3e-07,
    traffic=1e-06,
    warp=0.01,
    soft=2,
)


def predict_us(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> float:
    """Predicted microseconds of the kernel for a mask."""
    return float(predict(work_of(problem, config, fine, gpu), FITTED))


def work_of(problem: AttentionProblem, config: WarpSpecializedConfig, fine: FineMask, gpu: GPU) -> Work:
    """What a configuration does for a problem and a mask."""
    g = Geometry(problem, config)
    return Work.of(g, fine, gpu, g.grid_size(gpu))
