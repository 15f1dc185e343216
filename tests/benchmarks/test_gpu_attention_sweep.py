"""What the sweep prepares without a GPU: which configurations, and mask operands for every batch of a mask."""

import re

import numpy as np
import pytest

from benchmarks import gpu_attention_sweep as sweep
from benchmarks.peers.cases import attention_case
from benchmarks.peers.patterns import Pattern
from tir_kernels.attention.block_wise.cost import TILES
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.cuda.device import H200
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_90")


def test_every_tile_that_may_be_chosen_is_timed():
    problem = sweep.problem_of(attention_case(1, 12, 256, 64, "causal"))
    configs = sweep.configurations(problem, TARGET, [""])
    assert set(TILES) <= {(c.block_m, c.block_n, c.warps) for c in configs}
    few = sweep.configurations(problem, TARGET, ["32x32", "16x64"])
    assert few and all(re.match("32x32|16x64", config.label) for config in few)
    # A row's labels are all that the fit knows of a configuration.
    assert [BlockWiseConfig(*map(int, re.findall(r"\d+", c.label))) for c in configs] == configs


@pytest.mark.parametrize("mask", ["bigbird", "none"])
def test_operands_are_those_of_each_batch(mask):
    cases = [attention_case(batch, 12, 256, 64, mask) for batch in (1, 8)]
    found = sweep.operands(cases, (32, 64), H200)
    assert list(found) == [1, 8]
    for batch, ((work, entries, keep_bits), partial_shape, density) in found.items():
        assert set(work[:, 4]) == set(range(batch * 12))
        assert density == pytest.approx(Pattern(mask, 256, 256).density)
        assert partial_shape[0] == max(1, (work[:, 6] > 1).sum()) and partial_shape[2] == 2 * 32
        np.testing.assert_array_equal(entries, found[1][0][1])
        np.testing.assert_array_equal(keep_bits, found[1][0][2])
