"""The CUDA of scatters whose places rise, run on the CPU: all updates are written at once, wherever they begin."""

import numpy as np
import pytest
import tvm

from relax_passes.schedule.cuda import ScheduleForCUDA
from tests.tir_kernels.attention.block_maps.emulated import TARGET
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.scatter import scatter, scatter_in_place

OUTER, ROWS, WIDTH, UPDATES = 2, 300, 16, 40
THREADS = 128


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    shapes = (OUTER, ROWS, WIDTH), UPDATES, (1, UPDATES, 1), (OUTER, UPDATES, WIDTH)
    function = scatter_in_place(scatter(*shapes, "float16", "int64", "set", float("nan"), True, True))
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with TARGET:
        text = cuda_source(tvm.compile(ScheduleForCUDA(TARGET)(module), target=TARGET, tir_pipeline="default"))
    return EmulatedKernel(text, tmp_path_factory.mktemp("scatter"))


@pytest.mark.parametrize(
    "first", [0, 1, 117, ROWS - UPDATES, ROWS - UPDATES + 1, ROWS - 1, ROWS, ROWS + 999, -1 - ROWS]
)
def test_updates_are_written_at_once(kernel, first):
    numbers = np.random.default_rng(abs(first))
    x, update = (aligned(numbers.standard_normal((OUTER, n, WIDTH)).astype(np.float16)) for n in (ROWS, UPDATES))
    expected = x.copy()
    places = first + np.arange(UPDATES)
    inside = (places >= 0) & (places < ROWS)
    expected[:, places[inside]] = update[:, inside]
    if places[-1] >= ROWS:
        expected[:, -1] = np.nan
    if first < -ROWS:
        expected[:, 0] = np.nan
        rest = places[(places < 0) & (places > -ROWS)]
        expected[:, rest] = update[:, rest - first]
    count = OUTER * UPDATES * WIDTH // 8  # of threads, each with 16 bytes
    kernel({"x": x, "index": aligned(places), "update": update}, {}, range(-(-count // THREADS)), THREADS, 0)
    np.testing.assert_array_equal(x, expected)
