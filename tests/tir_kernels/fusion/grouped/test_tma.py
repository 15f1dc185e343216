"""The grouped product copied by the tensor memory accelerator: its CUDA run on the CPU, its tiles, where it is used."""

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.grouped_cases import offsets
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.grouped.emulation import assert_emulated, launch_of, maps_of, needs_gxx
from tir_kernels.cuda import device
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.grouped import grouped, simt, tma
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.grouped.tiles import list_bytes, listed_groups
from tir_kernels.fusion.problem import Step
from tir_kernels.target import parse_target

HOPPER = parse_target("cuda -arch=sm_90a")


def config(*sizes, **rest):
    return GemmConfig(*sizes, warpgroup=True, tma=True, **rest)


ONE, TWO = config(64, 64, 64, 4, 1, 3), config(64, 64, 64, 4, 1, 4, sets=2)


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """A GPU on which a CTA takes many tiles."""
    monkeypatch.setattr(device, "GPUS", [replace(device.H200, multiprocessors=2)])


@needs_gxx
@pytest.mark.parametrize(
    "given, layout",
    [(ONE, "nk"), (TWO, "nk"), (TWO, "kn"), (config(128, 128, 64, 8, 1, 3), "kn")],
    ids=lambda x: getattr(x, "label", x),
)
def test_groups_of_any_size(given, layout, few_multiprocessors, tmp_path):
    """Ends of rows, columns and k inside a tile; groups that are empty, that have all rows, and rows of none."""
    ends = [[3, 3, 140, 140], [0, 0, 0, 145], [145, 145, 145, 145], [0, 0, 0, 0], [1, 66, 131, 145]]
    assert_emulated(GroupedProblem(145, 136, 104, 4, "bfloat16", layout), given, ends, tmp_path)


@needs_gxx
@pytest.mark.parametrize("given", [config(128, 64, 64, 8, 1, 3), config(256, 128, 64, 8, 1, 3)], ids=lambda c: c.label)
def test_a_warpgroup_without_rows_of_the_group_passes_by(given, few_multiprocessors, tmp_path):
    each = given.block_m // 2
    ends = [[each, each + 1, 2 * each, 300], [each + 1, each + 1, 300, 300], [1, 2, 3, 290]]
    assert_emulated(GroupedProblem(300, 72, 136, 4, "float16"), given, ends, tmp_path)


@needs_gxx
@pytest.mark.parametrize("groups", [1, 31, 32, 70])
def test_numbers_of_groups(groups, few_multiprocessors, tmp_path):
    problem = GroupedProblem(141, 64, 16, groups, "float16", offsets_dtype="int64")
    ends = [offsets(problem, rows, seed) for rows in ("random", "one") for seed in range(2)]
    assert_emulated(problem, TWO, ends, tmp_path)


@needs_gxx
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_what_belongs_to_no_row_s_group_reaches_no_result(layout, few_multiprocessors, tmp_path):
    """The tiles at the end of a group's matrix reach into the next group's, whose numbers may be infinite."""
    problem = GroupedProblem(100, 72, 72, 4, "bfloat16", layout)
    assert_emulated(problem, ONE, [[40, 40, 80, 80], [0, 30, 30, 97]], tmp_path, infinite=True)


@needs_gxx
@pytest.mark.parametrize("given", [TWO, config(64, 256, 64, 4, 2, 3)], ids=lambda c: c.label)
def test_gates_and_steps_follow_the_product(given, few_multiprocessors, tmp_path):
    steps = (Step("scale", value=0.5), Step("sigmoid"))
    problem = GroupedProblem(145, 136, 104, 4, "bfloat16", gate="silu", steps=steps)
    assert_emulated(problem, given, [[3, 3, 140, 140], [0, 70, 140, 145]], tmp_path)


@needs_gxx
@pytest.mark.parametrize("layout, rows_dtype", [("nk", "int64"), ("kn", "int32")])
@pytest.mark.parametrize("given", [TWO, config(128, 128, 64, 8, 1, 3)], ids=lambda c: c.label)
def test_rows_chosen_at_run_time(given, layout, rows_dtype, few_multiprocessors, tmp_path):
    """Rows that do not exist are NaN, and so are those of the result; ends of rows, columns and k inside a tile."""
    after = {"gate": "silu"} if given is TWO else {}
    problem = GroupedProblem(145, 136, 104, 4, "bfloat16", layout, **after, gathered_from=20, rows_dtype=rows_dtype)
    ends = [[3, 3, 140, 140], [0, 0, 0, 145], [70, 135, 135, 145]]
    assert_emulated(problem, given, ends, tmp_path)


@needs_gxx
def test_more_tiles_of_rows_than_go_together(few_multiprocessors, tmp_path):
    assert_emulated(GroupedProblem(1300, 136, 24, 2, "float16"), ONE, [[1100, 1290], [0, 700]], tmp_path)


@needs_gxx
def test_offsets_out_of_bounds_reach_no_memory_outside(tmp_path):
    """Undefined in PyTorch; the emulator raises for a read or a write outside of a buffer."""
    problem = GroupedProblem(100, 64, 16, 3, "float16")
    kernel = EmulatedKernel(source(grouped, problem, ONE, "sm_90a"), tmp_path)
    shapes = {"a": (100, 16), "w": problem.w_shape, "out": (100, 64)}
    arrays = {name: aligned(np.zeros(shape, np.int16)) for name, shape in shapes.items()}
    ctas, *size = launch_of(problem, ONE)
    for end in ([500, 10, 20], [-5, 1000, 3], [2**31 - 1, -(2**31), 0]):
        arrays["offsets"] = aligned(np.array(end, np.int32))
        kernel(arrays | maps_of(problem, ONE, arrays), {}, range(ctas), *size)


@pytest.mark.parametrize("gate", [None, "silu"])
def test_many_rows_get_it_and_few_rows_get_small_tiles(gate):
    few, many = (GroupedProblem(m, 1024, 2048, 64, "bfloat16", gate=gate) for m in (64, 32768))
    assert grouped.configs(many, HOPPER)[0].tma and grouped.configs(few, HOPPER)[0].block_m <= 64
    assert not any(c.tma for c in grouped.configs(many, parse_target("cuda -arch=sm_80")))


def test_rows_are_gathered_by_it_alone():
    problem = GroupedProblem(4096, 1024, 1024, 64, "bfloat16", gathered_from=512)
    assert grouped.unsupported(problem, HOPPER) is None and all(c.tma for c in grouped.configs(problem, HOPPER))
    assert "gathers rows on sm_80" in grouped.unsupported(problem, parse_target("cuda -arch=sm_80"))
    assert "2^31" in grouped.unsupported(replace(problem, gathered_from=2**21), HOPPER)
    assert "in their order" in simt.unsupported(problem, HOPPER)


def test_the_list_of_tiles_fits_beside_the_stages():
    for groups in (1, 7, 8, 256, 4096):
        problem = GroupedProblem(4096, 1024, 1024, groups, "bfloat16")
        assert groups < listed_groups(groups) <= 2 * groups
        assert list_bytes(groups) == 4 * (listed_groups(groups) + groups + 2)
        found = [c for c in grouped.configs(problem, HOPPER) if c.tma]
        assert found and all(tma.shared_bytes(problem, c) <= 232448 for c in found)
    assert not any(c.tma for c in grouped.configs(replace(problem, groups=30000), HOPPER))
