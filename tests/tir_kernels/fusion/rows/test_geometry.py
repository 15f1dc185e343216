"""Dealing out rows to threads: every element once, full warps, and the choice that was seen to be the fastest."""

import pytest

from tir_kernels.cuda.device import H200
from tir_kernels.fusion.rows.geometry import MAX_VECTORS, VECTOR, WARP, RowConfig, RowGeometry, refusal, row_configs


@pytest.mark.parametrize("n", [8, 16, 24, 64, 72, 200, 768, 776, 1000, 1024, 2056, 4096, 8192, 16384, 16392, 32768])
@pytest.mark.parametrize("m", [1, 100, 4096, 32768])
def test_configurations_hold_each_row_in_full_warps(m, n):
    found = row_configs(m, n, H200)
    assert found and len(set(found)) == len(found)
    for config in found:
        g = RowGeometry(m, n, config)
        assert g.threads % WARP == 0 and g.threads <= 512 and g.vectors_per_thread <= MAX_VECTORS
        held = [
            t + v * config.threads_per_row
            for v in range(g.vectors_per_thread)
            for t in range(config.threads_per_row)
            if t + v * config.threads_per_row < g.vectors
        ]
        assert sorted(held) == list(range(n // VECTOR))
        assert g.ctas * config.rows_per_cta >= m > (g.ctas - 1) * config.rows_per_cta


@pytest.mark.parametrize("n, threads", [(768, 96), (776, 128), (776, 64), (2056, 96), (4096, 256)])
def test_elements_of_the_warps_of_a_row(n, threads):
    g = RowGeometry(1, n, RowConfig(threads, 1))
    counts = [0] * g.warps_per_row
    for vector in range(g.vectors):
        counts[vector % threads // WARP] += VECTOR
    assert [g.elements_of_warp(w) for w in range(g.warps_per_row)] == counts and min(counts) > 0


@pytest.mark.parametrize(
    "m, n, matrices, expected",
    [
        (1, 768, 1, RowConfig(96, 1)),
        (2048, 768, 1, RowConfig(96, 2)),
        (4096, 768, 1, RowConfig(32, 4)),
        (32768, 768, 1, RowConfig(96, 2)),
        (4096, 1024, 1, RowConfig(128, 1)),
        (4096, 4096, 1, RowConfig(256, 1)),
        (512, 768, 2, RowConfig(96, 2)),
        (4096, 768, 2, RowConfig(96, 2)),
        (2048, 1024, 2, RowConfig(128, 1)),
        (4096, 4096, 2, RowConfig(256, 1)),
    ],
)
def test_default_is_what_an_h200_ran_fastest(m, n, matrices, expected):
    assert row_configs(m, n, H200, matrices=matrices)[0] == expected


def test_refusals_name_value_and_rule():
    assert refusal(4096, 4096) is None
    assert "n=12 must be a multiple of 8" in refusal(1, 12)
    assert "32768" in refusal(1, 32776)
    assert "2^31" in refusal(1 << 19, 4096)
