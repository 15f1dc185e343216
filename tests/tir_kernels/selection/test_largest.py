"""The k largest of each row: the generated CUDA run on the CPU, beside sorting."""

import shutil

import numpy as np
import pytest

from tests.tir_kernels.attention.block_maps.emulated import emulated
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.selection.largest import THREADS, largest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def expected(scores, k):
    """Boolean like scores: by falling score, NaN first, then by place."""
    order = np.where(np.isnan(scores), np.inf, scores)
    rank = np.lexsort((np.broadcast_to(np.arange(scores.shape[1]), scores.shape), -order, ~np.isnan(scores)), axis=-1)
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, rank[:, :k], True, axis=1)
    return kept & (scores != -np.inf)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> EmulatedKernel:
    return emulated(largest(), tmp_path_factory.mktemp("largest"), "kernel")


def rows_of(n):
    rng = np.random.default_rng(n)
    normal = rng.standard_normal((4, n)).astype(np.float32)
    few = rng.integers(-2, 3, (4, n)).astype(np.float32)  # many equal ones
    special = normal.copy()
    special[rng.random(special.shape) < 0.3] = -np.inf
    special[0, n // 2] = np.nan
    special[1, n // 3] = -np.nan
    special[2, :] = -np.inf
    special[3, n // 2] = np.inf
    zeros = np.where(rng.random((2, n)) < 0.5, -0.0, 0.0).astype(np.float32)
    close = (1 + np.arange(2 * n).reshape(2, n) * 2.0**-23).astype(np.float32)[:, ::-1]
    return np.concatenate([normal, few, special, zeros, close])


@pytest.mark.parametrize("n", [1, 5, 64, 255, 256, 257, 900])
def test_the_largest_and_of_equal_ones_the_first(kernel, n):
    scores = rows_of(n)
    for k in sorted({1, 2, n // 3 + 1, n, n + 7}):
        kept = aligned(np.full(scores.shape, 77, np.uint8))
        kernel(
            {"scores": aligned(scores), "kept": kept},
            {"n": n, "rows": len(scores), "k": k},
            range(len(scores)),
            THREADS,
            0,
        )
        np.testing.assert_array_equal(kept, expected(scores, k), err_msg=f"{n} {k}")
