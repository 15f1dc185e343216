"""The configurations of two products in one kernel: they fit, and every CTA has work."""

import pytest

from tests.tir_kernels.fusion.kernels import mlp
from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.gemm.sizes.configs import FULL_GPU
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.mlp.configs import mlp_configs
from tir_kernels.fusion.mlp.geometry import MlpGeometry
from tir_kernels.target import parse_target

TARGETS = [parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90a")]


@pytest.mark.parametrize("target", TARGETS, ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("sizes", [(1, 8, 8, 8), (128, 768, 64, 768), (4096, 256, 512, 200), (515, 256, 400, 264)])
def test_every_configuration_fits_and_every_part_has_tiles(sizes, target):
    problem = mlp(*sizes)
    configs = mlp_configs(problem, target)
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        g = MlpGeometry(problem, config)
        assert g.shared_bytes <= target.attrs["max_shared_memory_per_block"]
        assert (config.parts - 1) * g.tiles_per_part < g.second.n_tiles <= config.parts * g.tiles_per_part
        assert config.parts == 1 or g.ctas <= FULL_GPU * gpu_of(target).multiprocessors


def test_whole_rows_of_the_first_product_are_in_shared_memory():
    """In one tile or two next to each other, whole blocks of the second product's k."""
    for inner, tiles, width in ((8, 1, 64), (64, 1, 64), (200, 1, 256), (256, 1, 256), (264, 2, 192), (512, 2, 256)):
        g = MlpGeometry(mlp(64, 64, inner, 64), mlp_cuda.Config(16, 64, 1, 4, 2))
        assert (g.inner_tiles, g.inner_width) == (tiles, width)
        assert inner <= g.inner_tile.dim == tiles * width
