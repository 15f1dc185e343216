"""The grouped product on CUDA: its generated CUDA run on the CPU against its definition, and what it refuses."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.grouped_cases import offsets
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.grouped.emulation import assert_emulated, needs_gxx
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.grouped import grouped, simt
from tir_kernels.fusion.grouped.kernel import geometry, grid_size
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import Step
from tir_kernels.target import parse_target

SM_80, SM_90A = (parse_target(f"cuda -arch={arch}") for arch in ("sm_80", "sm_90a"))
SMALL = GemmConfig(16, 64, 64, 1, 4, 3)
WGMMA = GemmConfig(64, 64, 64, 4, 1, 4, warpgroup=True)


@needs_gxx
@pytest.mark.parametrize("dtype, layout", [("float16", "nk"), ("bfloat16", "kn")])
def test_groups_of_any_size(dtype, layout, tmp_path):
    ends = [[3, 3, 40, 40], [0, 0, 0, 45], [45, 45, 45, 45], [0, 0, 0, 0], [1, 2, 3, 4]]
    assert_emulated(GroupedProblem(45, 72, 104, 4, dtype, layout), SMALL, ends, tmp_path)


@needs_gxx
@pytest.mark.parametrize("groups", [1, 32, 70])  # a lane has several groups, and the rest one more
def test_numbers_of_groups(groups, tmp_path):
    problem = GroupedProblem(41, 64, 16, groups, "float16", offsets_dtype="int64")
    ends = [offsets(problem, rows, seed) for rows in ("random", "one") for seed in range(2)]
    assert_emulated(problem, SMALL, ends, tmp_path)


@needs_gxx
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_wgmma(layout, tmp_path):
    problem = GroupedProblem(145, 72, 104, 4, "float16", layout)
    assert_emulated(problem, WGMMA, [[3, 3, 140, 140], [70, 145, 145, 145]], tmp_path)


@needs_gxx
@pytest.mark.parametrize("config", [GemmConfig(16, 128, 64, 1, 4, 3), WGMMA], ids=["mma", "wgmma"])
def test_gates_and_steps_follow_the_product(config, tmp_path):
    ends = [[3, 3, 40, 40]]
    for number, after in enumerate(({"gate": "silu"}, {"steps": (Step("gelu"), Step("scale", value=0.5))})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_emulated(GroupedProblem(45, 72, 104, 4, "bfloat16", **after), config, ends, folder)


@needs_gxx
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype, rows", [("float32", 64), ("float32", 16), ("float16", 16)])
def test_without_tensor_cores(dtype, rows, layout, tmp_path):
    """Lengths of any size."""
    ends = [[3, 3, 70, 70], [0, 0, 0, 75], [0, 0, 0, 0]]
    assert_emulated(GroupedProblem(75, 67, 37, 4, dtype, layout), simt.Config(rows), ends, tmp_path)


@needs_gxx
@pytest.mark.slow
@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=str)
def test_default_tiles_of_few_and_of_many_rows(target, tmp_path):
    for m in (5, 150):
        problem = GroupedProblem(m, 136, 72, 3, "bfloat16")
        folder = tmp_path / str(m)
        folder.mkdir()
        assert_emulated(problem, grouped.configs(problem, target)[0], [[m // 2, m // 2, m - 1]], folder)


def test_offsets_out_of_bounds_reach_no_memory_outside(tmp_path):
    """Undefined in PyTorch; the emulator raises for a read or a write outside of a buffer."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: nothing can be emulated")
    problem = GroupedProblem(20, 64, 16, 3, "float16")
    kernel = EmulatedKernel(source(grouped, problem, SMALL, "sm_80"), tmp_path)
    g = geometry(problem, SMALL)
    shapes = {"a": (20, 16), "w": problem.w_shape, "out": (20, 64)}
    arrays = {name: aligned(np.zeros(shape, np.int16)) for name, shape in shapes.items()}
    for end in ([50, 10, 20], [-5, 100, 3], [2**31 - 1, -(2**31), 0]):
        arrays["offsets"] = aligned(np.array(end, np.int32))
        kernel(arrays, {}, range(grid_size(problem, SMALL)), g.threads, g.shared_bytes)


def test_the_grid_has_a_tile_for_every_row_of_any_division():
    generator = np.random.default_rng(0)
    for _ in range(300):
        m, groups, rows = generator.integers(1, 200), generator.integers(1, 20), generator.integers(1, 40)
        ends = np.sort(generator.integers(0, m + 1, groups))
        sizes = np.diff([0, *ends, m])
        assert sum(-(-sizes // rows)) <= GroupedProblem(int(m), 8, 8, int(groups), "float16").row_tiles(int(rows))


def test_few_rows_get_small_tiles_and_predictions_grow():
    few, many = (GroupedProblem(m, 2048, 2048, 64, "bfloat16") for m in (64, 16384))
    for target in (SM_80, SM_90A):
        best = [grouped.configs(problem, target)[0] for problem in (few, many)]
        assert best[0].block_m <= 32 and best[1].block_m * best[1].block_n >= 128 * 128
        assert grouped.predict_us(few, best[0], target) < grouped.predict_us(many, best[1], target)


def test_what_it_refuses():
    problem = GroupedProblem(64, 64, 64, 4, "float16")
    assert grouped.unsupported(problem, SM_80) is None
    assert "not in float32" in grouped.unsupported(replace(problem, dtype="float32"), SM_80)
    assert "n=60 must be a multiple of 8" in grouped.unsupported(replace(problem, n=60), SM_80)
    assert "k=60 must be a multiple of 8" in grouped.unsupported(replace(problem, k=60), SM_80)
    odd = replace(problem, dtype="float32", n=60, k=61)
    assert simt.unsupported(odd, SM_80) is None and simt.configs(odd, SM_80)[0].block_m == 16
    assert simt.unsupported(None, SM_80) == grouped.unsupported(None, SM_80) == "it is no grouped product"
    assert "2^31" in simt.unsupported(replace(odd, n=2**20, k=2**12), SM_80)
    for after in ({"gate": "silu"}, {"steps": (Step("relu"),)}):
        assert "the product alone" in simt.unsupported(replace(problem, **after), SM_80)
        assert grouped.unsupported(replace(problem, **after), SM_80) is None
    for wrong, error in (
        ({"m": 0}, InputError),
        ({"w_layout": "mn"}, InputError),
        ({"offsets_dtype": "int16"}, InputError),
        ({"dtype": "float64"}, UnsupportedError),
        ({"gate": "softmax"}, InputError),
    ):
        with pytest.raises(error, match=str(*wrong.values())):
            replace(problem, **wrong)
    with pytest.raises(InputError, match="n=60"):
        replace(problem, n=60, gate="silu")
    with pytest.raises(InputError, match="no operands"):
        replace(problem, steps=(Step("add", "row"),))
