"""The configurations of the CUDA kernel of two products that are worth compiling for a problem."""

from tir_kernels.cuda.device import GPU, gpu_of
from tir_kernels.fusion.gemm.sizes.configs import FULL_GPU
from tir_kernels.fusion.mlp.geometry import MlpConfig, MlpGeometry, legal
from tir_kernels.fusion.problem import MlpProblem

# (block_m, block_n, warps_m, warps_n)
TILES = (
    (16, 64, 1, 4),
    (16, 128, 1, 4),
    (32, 64, 1, 4),
    (32, 128, 1, 4),
    (32, 128, 2, 4),
    (64, 64, 2, 2),
    (64, 128, 2, 2),
    (64, 128, 2, 4),
    (64, 128, 4, 4),
    (64, 256, 2, 4),
    (128, 64, 4, 2),
    (128, 128, 4, 2),
    (128, 128, 2, 4),
    (128, 256, 2, 4),
)
STAGES = (2, 3, 4, 6)
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def mlp_configs(problem: MlpProblem, target) -> list[MlpConfig]:
    """Every configuration of these tiles, stages and parts that fits the target and leaves each part some columns."""
    gpu, limit = gpu_of(target), int(target.attrs["max_shared_memory_per_block"])
    found = []
    for tile in TILES:
        for stages in STAGES:
            g = MlpGeometry(problem, MlpConfig(*tile, stages))
            if legal(g, limit):
                found += [MlpConfig(*tile, stages, parts) for parts in parts_of(g, gpu)]
    return found


def parts_of(g: MlpGeometry, gpu: GPU) -> list[int]:
    """Numbers of parts, none of them empty, with at most `FULL_GPU` CTAs for each multiprocessor; 1 is always there."""
    n_tiles = g.second.n_tiles
    even = [p for p in PARTS if p <= n_tiles and -(-n_tiles // -(-n_tiles // p)) == p]
    return [p for p in even if p == 1 or g.first.m_tiles * p <= FULL_GPU * gpu.multiprocessors]
