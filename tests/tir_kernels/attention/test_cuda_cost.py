"""The CUDA time model: what it must get right, and that choosing by it is quick."""

import time

import numpy as np
import pytest

from tir_kernels.attention import block_wise_cuda
from tir_kernels.attention.cuda_cost import predict_us, shortlist
from tir_kernels.attention.cuda_geometry import BlockWiseConfig
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import choose
from tir_kernels.block_sparse_mask import BlockSparseMask
from tir_kernels.target import parse_target

SM_90 = parse_target("cuda -arch=sm_90")


def problem(length, dim=64, batch=8, heads=12):
    return AttentionProblem(batch, heads, heads, length, length, dim, dim, "float16", dim**-0.5)


class Pattern:
    """A mask by its dense array, compiled once for each block size."""

    def __init__(self, keep):
        self.keep, self.compiled = keep, {}

    def compile(self, q_len, kv_len, block, token_stride=1):
        if block not in self.compiled:
            self.compiled[block] = BlockSparseMask.from_dense(self.keep, block)
        return self.compiled[block]


def causal(length):
    return Pattern(np.tri(length, dtype=bool))


def window(length):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    return Pattern(abs(i - j) <= 32)


def test_choices_at_measured_points():
    """Where one configuration is at least 8 % ahead on an H200."""
    assert choose(problem(2048), causal(2048), SM_90).config == BlockWiseConfig(128, 64, 4, 2)
    assert choose(problem(2048), window(2048), SM_90).config == BlockWiseConfig(64, 32, 4, 2)
    assert choose(problem(2048, 128, 1, 32), window(2048), SM_90).config == BlockWiseConfig(64, 32, 4, 2)


@pytest.mark.parametrize(
    "given, mask, measured_us",
    [
        (problem(2048), causal(2048), 171),
        (problem(2048), window(2048), 40),
        (problem(1024, batch=1), causal(1024), 13.2),
        (problem(1024, batch=1), window(1024), 5.3),
        (problem(2048, 128, 1, 32), causal(2048), 114),
    ],
)
def test_predictions_are_near_the_h200_measurements(given, mask, measured_us):
    assert choose(given, mask, SM_90).predicted_us == pytest.approx(measured_us, rel=0.3)


def test_more_work_takes_longer_and_fewer_multiprocessors_too():
    given, config = problem(1024), BlockWiseConfig(64, 64, 4, 2)
    block = (64, 64)
    sparse, dense = (m.compile(1024, 1024, block) for m in (window(1024), causal(1024)))
    assert predict_us(given, config, sparse, "sm_90") < predict_us(given, config, dense, "sm_90")
    assert predict_us(given, config, dense, "sm_90a") < predict_us(given, config, dense, "sm_86")


def test_a_prediction_takes_about_a_millisecond():
    given, mask = problem(4096), BlockSparseMask.keep_all(4096, 4096, (64, 32))
    config = BlockWiseConfig(64, 32, 4, 2)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        predict_us(given, config, mask, "sm_90")
        times.append(time.perf_counter() - start)
    assert min(times) < 1.5e-3


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
def test_every_head_size_has_something_to_predict(arch, dim):
    target = parse_target(f"cuda -arch={arch}")
    given = problem(128, dim)
    choice = choose(given, causal(128), target)
    assert choice.config in shortlist(block_wise_cuda.configs(given, target)) and choice.predicted_us > 0
