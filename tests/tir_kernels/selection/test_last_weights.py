"""The last queries' weights by key and by distance: the generated CUDA run on the CPU, beside NumPy in float64."""

import shutil

import numpy as np
import pytest

from tests.tir_kernels.attention.block_maps.emulated import emulated
from tests.tir_kernels.attention.cuda_emulator import aligned
from tir_kernels.selection.last_weights import KEYS, THREADS, normalizers, sums

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
SCALE = 0.37


def expected(products):
    """Float64 (heads, n), twice, as PyTorch's operators have it: what is not seen is -inf, NaN stays NaN."""
    heads, rows, n = products.shape
    place = n - rows + np.arange(rows)[:, None]
    with np.errstate(invalid="ignore"):
        scores = products.astype(np.float64) * SCALE + np.where(np.arange(n) > place, -np.inf, 0)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    by_distance = np.zeros((heads, n))
    for r in range(rows):
        by_distance[:, : n - rows + r + 1] += weights[:, r, : n - rows + r + 1][:, ::-1]
    return weights.sum(1), by_distance


@pytest.fixture(scope="module")
def summed(tmp_path_factory):
    """A function of products, float32 (heads, rows, n), to what the kernels make of them; CTAs in any order."""
    folder = tmp_path_factory.mktemp("last_weights")
    first, second = emulated(normalizers(), folder, "normalizers"), emulated(sums(), folder, "sums")

    def run(products):
        heads, rows, n = products.shape
        products, normalizer = aligned(products.reshape(-1, n)), aligned(np.zeros((heads * rows, 2), np.float32))
        numbers = {"lines": heads * rows, "heads": heads, "n": n, "rows": rows, "scale": SCALE}
        first({"products": products, "normalizer": normalizer}, numbers, range(heads * rows), THREADS, 0)
        found = {name: aligned(np.full((heads, n), -7, np.float32)) for name in ("by_key", "by_distance")}
        ctas = reversed(range(heads * -(-n // (KEYS * THREADS))))
        second({"products": products, "normalizer": normalizer, **found}, numbers, list(ctas), THREADS, 0)
        return found["by_key"], found["by_distance"]

    return run


@pytest.mark.parametrize("rows, n", [(1, 1), (1, 700), (3, 3), (8, 50), (64, 64), (5, 513), (17, 2100), (16, 512)])
def test_sums(summed, rows, n):
    products = (np.random.default_rng(n).standard_normal((2, rows, n)) * 8).astype(np.float32)
    for found, sums_of in zip(summed(products), expected(products)):
        np.testing.assert_allclose(found, sums_of, rtol=2e-5, atol=1e-7)


def test_what_is_no_number(summed):
    """Rows of NaN, of infinities, of nothing but -inf, and NaN where a row doesn't look; the others are as without."""
    products = np.random.default_rng(0).standard_normal((7, 6, 600)).astype(np.float32)
    products[1, 2, 7] = np.nan
    products[2, 5, 599] = np.inf
    products[3, 1] = -np.inf
    products[4, 0, 599] = -np.nan  # of a later key
    products[5, :, ::2] = -np.inf
    products[6, 4, 595:] = np.inf
    for found, sums_of in zip(summed(products), expected(products)):
        assert np.isnan(sums_of[1:5]).any(-1).all() and not np.isnan(sums_of[[0, 5]]).any()
        np.testing.assert_allclose(found, sums_of, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1e-6, 1e4, 3e37])
def test_small_and_large_products(summed, size):
    products = (np.random.default_rng(1).integers(-9, 10, (1, 4, 300)) * size).astype(np.float32)
    for found, sums_of in zip(summed(products), expected(products)):
        np.testing.assert_allclose(found, sums_of, rtol=2e-5, atol=1e-7)
