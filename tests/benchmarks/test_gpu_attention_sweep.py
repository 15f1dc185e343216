"""What the sweep prepares without a GPU: which configurations, and mask operands for every batch of a mask."""

import re

import numpy as np
import pytest

from benchmarks import gpu_attention_sweep as sweep
from benchmarks.fit_attention_model import config_of
from benchmarks.peers.cases import attention_case
from benchmarks.peers.patterns import Pattern
from tir_kernels.attention.block_wise.cost import TILES
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.block_wise.work import Item
from tir_kernels.attention.mask_forms import compile_mask
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.work import Item as SpecializedItem
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_90a")


@pytest.mark.parametrize("may_be_chosen", [False, True])
def test_every_tile_that_may_be_chosen_is_timed(may_be_chosen):
    problem = sweep.problem_of(attention_case(1, 12, 256, 64, "causal"))
    configs = sweep.configurations(problem, TARGET, [""], may_be_chosen)
    assert set(TILES) <= {(c.block_m, c.block_n, c.warps) for c in configs if isinstance(c, BlockWiseConfig)}
    assert set(specialized.worth_predicting(specialized.configs(problem, TARGET))) <= set(configs)
    few = sweep.configurations(problem, TARGET, ["32x32", "64x64"], may_be_chosen)
    assert few and all(re.match("32x32|64x64", config.label) for config in few)
    # A row's labels are all that the fit knows of a configuration.
    assert [config_of(c.label) for c in configs] == configs


@pytest.mark.parametrize("mask", ["bigbird", "none"])
def test_operands_are_those_of_each_batch(mask):
    cases = [attention_case(batch, 12, 256, 64, mask) for batch in (1, 8)]
    configs = [BlockWiseConfig(64, 64, 4, 2), BlockWiseConfig(64, 64, 2, 2), specialized.Config(64, 64, 2)]
    found = sweep.operands(cases, configs, "sm_90a")
    for batch in (1, 8):
        assert found[batch] == pytest.approx(Pattern(mask, 256, 256).density)
        assert found[batch, configs[0].label] is found[batch, configs[1].label]
        for config, head in ((configs[0], Item.HEAD), (configs[2], SpecializedItem.HEAD)):
            work, entries, keep_bits = found[batch, config.label].constants
            assert set(work[:, head]) == set(range(batch * 12))
            _, first_entries, first_bits = found[1, config.label].constants
            np.testing.assert_array_equal(entries, first_entries)
            np.testing.assert_array_equal(keep_bits, first_bits)


@pytest.mark.parametrize("mask, apart", [("dilated_window", 2), ("strided", 1), ("causal", 1), ("none", 1)])
def test_blocks_of_tokens_apart_are_timed_where_a_mask_keeps_multiples_alone(mask, apart):
    case = attention_case(1, 12, 256, 64, mask)
    assert sweep.token_stride_of(case) == apart
    config = BlockWiseConfig(64, 32, 4, 2, apart, warpgroup=True)
    assert config_of(config.label) == config
    stored = compile_mask(Pattern(mask, 256, 256).stof_mask(), sweep.problem_of(case), (64, 32), apart)
    found = sweep.operands([case], [config], "sm_90a")[1, config.label].constants
    wanted = sweep.template_of(config).operands(sweep.problem_of(case), config, TARGET, stored).constants
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
