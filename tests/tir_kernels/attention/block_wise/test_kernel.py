"""The CUDA block-wise kernel: what it supports, its configurations, what it declares.

What it computes: test_cuda_parts.py and test_cuda_split.py; its sources: tests/gpu/test_all_cases.py.
"""

import re

import pytest

from tests.gpu.sources import launch_bounds, source
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.target import parse_target


def problem(**changes):
    fields = dict(batch=2, q_heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=64, v_head_dim=64, dtype="float16")
    return AttentionProblem(**{**fields, "scale": 0.125, **changes})


SM_80, SM_86 = parse_target("cuda -arch=sm_80"), parse_target("cuda -arch=sm_86")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"head_dim": 36}, "head_dim=36 must be a multiple of 8"),
        ({"v_head_dim": 4}, "v_head_dim=4 must be a multiple of 8"),
        ({"batch": 1024, "q_heads": 64, "kv_heads": 64, "q_len": 1024}, "32-bit"),
        ({"layouts": Layouts(k=View(2**22, 0, 300 * 900, 64, 900))}, "k is a view .*:270000,64,900: .* of 8"),
        ({"layouts": Layouts(v=View(2**22, 4, 300 * 128, 64, 128))}, "v is a view .* of 8"),
    ],
)
def test_unsupported_problems_name_value_and_rule(changes, words):
    assert re.search(words, block_wise_cuda.unsupported(problem(**changes), SM_80))


@pytest.mark.parametrize("dim", [8, 16, 32, 40, 64, 80, 96, 128, 192, 256])
def test_every_multiple_of_8_up_to_256_is_supported(dim):
    for target in (SM_80, SM_86):
        given = problem(head_dim=dim, v_head_dim=dim)
        assert block_wise_cuda.unsupported(given, target) is None
        limit = int(target.attrs["max_shared_memory_per_block"])
        assert all(Geometry(given, c).shared_bytes <= limit for c in block_wise_cuda.configs(given, target))


def test_configs_are_distinct_and_start_with_the_default():
    configs = block_wise_cuda.configs(problem(), SM_80)
    assert len(set(configs)) == len(configs) == len({c.label for c in configs})
    assert configs[0] == BlockWiseConfig(64, 32, 4, 2)
    assert block_wise_cuda.configs(problem(head_dim=128), SM_80)[0] == BlockWiseConfig(64, 64, 4, 2)


@pytest.mark.parametrize("config", [BlockWiseConfig(64, 32, 4, 2), BlockWiseConfig(128, 64, 4, 1)])
def test_kernel_promises_the_occupancy_of_its_geometry(config):
    g = Geometry(problem(), config)
    assert launch_bounds(source(block_wise_cuda, problem(), config)) == (g.threads, g.ctas_per_multiprocessor)


def test_kernel_declares_what_relax_needs():
    with quick_script():
        func = block_wise_cuda.instantiate(problem(bias_shape=(1, 4, 300, 300)), BlockWiseConfig(64, 64, 4, 2), SM_80)
    assert [func.attrs[k] for k in ("tirx.noalias", "op_pattern", "tirx.is_scheduled")] == [True, 8, True]
    assert len(func.params) == 10  # q, k, v, bias, work, entries, keep_bits, partials, arrivals, out
