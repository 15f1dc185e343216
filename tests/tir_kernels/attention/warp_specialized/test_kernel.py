"""The warp-specialized kernel: what it supports, its configurations, what it declares.

What it computes: test_results.py; its sources: tests/gpu/test_all_cases.py.
"""

import re

import pytest

from tests.gpu.sources import launch_bounds, source
from tir_kernels.attention.block_wise import kernel as block_wise
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.select import choose
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import Geometry, WarpSpecializedConfig
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.device import H200, gpu_of
from tir_kernels.cuda.registers import REGISTERS
from tir_kernels.target import parse_target

SM_90A = parse_target("cuda -arch=sm_90a")


def problem(**changes):
    fields = dict(batch=2, q_heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=64, v_head_dim=64, dtype="float16")
    return AttentionProblem(**{**fields, "scale": 0.125, **changes})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": "float32"}, "float16 or bfloat16 inputs, got float32"),
        ({"head_dim": 36}, "head_dim=36 must be a multiple of 8"),
        ({"v_head_dim": 28}, "v_head_dim=28 must be a multiple of 8"),
        ({"batch": 1024, "q_heads": 64, "kv_heads": 64, "q_len": 1024}, "q of shape .* 2.31 elements .* 32-bit"),
        ({"layouts": Layouts(k=View(2**22, 0, 300 * 900, 64, 900))}, "k is a view .*:270000,64,900: .* of 8"),
        ({"layouts": Layouts(v=View(2**22, 4, 300 * 128, 64, 128))}, "v is a view .* of 8"),
        ({"layouts": Layouts(k=View(2**22, 0, 128, 64, 0))}, "k repeats one token"),
    ],
)
def test_unsupported_problems_name_value_and_rule(changes, words):
    assert re.search(words, specialized.unsupported(problem(**changes), SM_90A))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a"])
def test_it_is_for_hopper_with_its_own_instructions(arch):
    assert f"sm_90a's, the target is {arch}" in specialized.unsupported(problem(), parse_target(f"cuda -arch={arch}"))


@pytest.mark.parametrize("layouts", [Layouts(), Layouts(k=View(2**22, 0, 0, 0, 64)), Layouts("sbhd", "shbd", "hsbd")])
def test_repeated_heads_and_any_order_are_supported(layouts):
    assert specialized.unsupported(problem(layouts=layouts), SM_90A) is None


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_multiple_of_8_up_to_256_has_configurations_that_fit(dim):
    given = problem(head_dim=dim, v_head_dim=dim)
    assert specialized.unsupported(given, SM_90A) is None
    configs = specialized.configs(given, SM_90A)
    assert configs and len(set(configs)) == len(configs) == len({c.label for c in configs})
    for config in configs:
        g = Geometry(given, config)
        ctas = g.ctas_per_multiprocessor
        assert ctas >= 1 and g.shared_bytes <= int(SM_90A.attrs["max_shared_memory_per_block"])
        assert ctas * (g.shared_bytes + 1024) <= H200.shared_bytes
        assert ctas * g.threads * g.registers <= REGISTERS


def test_the_default_comes_first():
    for dim in (64, 128):
        given = problem(head_dim=dim, v_head_dim=dim)
        assert specialized.configs(given, SM_90A)[0] == WarpSpecializedConfig(128, 128, 2)
    assert specialized.configs(problem(head_dim=256, v_head_dim=256), SM_90A)[0] == WarpSpecializedConfig(128, 64, 2)


@pytest.mark.parametrize(
    "config", [WarpSpecializedConfig(64, 64, 2), WarpSpecializedConfig(192, 64, 2), WarpSpecializedConfig(64, 128, 3)]
)
def test_kernel_promises_the_occupancy_of_its_geometry(config):
    g = Geometry(problem(), config)
    text = source(specialized, problem(), config, "sm_90a")
    ctas = g.ctas_per_multiprocessor
    assert launch_bounds(text) == (g.cta_threads, ctas)
    traded = {way: int(n) for way, n in re.findall(r'"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (\d+);', text)}
    assert traded == ({"dec": 32, "inc": g.registers_at(ctas)} if g.trades_registers else {})


@pytest.mark.parametrize("length, before", [(300, 64), (250, 128)])
def test_rows_that_may_be_negative_are_compared_with_the_length_as_unsigned_numbers(length, before):
    """All of them: those of the output, of the log-sum-exp, of an earlier part and of a bias."""
    given = problem(q_len=length, kv_len=401, bias_shape=(1, 4, length, 401), continues=True, gives_lse=True)
    config = WarpSpecializedConfig(192, 64, 2)
    assert Geometry(given, config).leading_rows == before
    text = source(specialized, given, config, "sm_90a")
    compared, of_bias = (re.findall(rf"{sign} (\S*\b{n})\)", text) for sign, n in (("<", length), (",", length - 1)))
    assert len(compared) == 4 + 2 + 2 and set(compared) == {f"(uint){length}"}
    assert len(of_bias) >= 32 and set(of_bias) == {f"(uint){length - 1}"}
    # Nor is there a comparison that was simplified.
    assert len(re.findall(r"rest_ptr\[0\][^;?]*<", text)) == len(compared)


def test_grid_has_the_ctas_that_run_at_once():
    g = Geometry(problem(), WarpSpecializedConfig(64, 64, 2))
    gpu = gpu_of(SM_90A)
    assert g.grid_size(gpu) == g.ctas_per_multiprocessor * gpu.multiprocessors == 3 * 132


def test_kernel_declares_what_relax_needs():
    given = problem(bias_shape=(1, 4, 300, 300), sink_dtype="float32", continues=True, gives_lse=True)
    with quick_script():
        func, least = (specialized.instantiate(x, WarpSpecializedConfig(64, 64, 2), SM_90A) for x in (given, problem()))
    assert [func.attrs[k] for k in ("tirx.noalias", "op_pattern", "tirx.is_scheduled")] == [True, 8, True]
    assert func.attrs["global_symbol"] == "warp_specialized_attention_64x64x2"
    # q, k, v, bias, sink, prior, prior_lse, items, entries, keep_bits, partials, arrivals, taken, out, lse
    assert len(func.params) == 15
    assert len(least.params) == 10  # without those in the middle, and without lse


@pytest.mark.parametrize("dim", range(16, 257, 16))
@pytest.mark.parametrize("bias_shape", [None, (1, 1, 300, 300)])
def test_what_is_supported_has_a_configuration(dim, bias_shape):
    for v_dim in (dim, 64, 256):
        given = problem(head_dim=dim, v_head_dim=v_dim, bias_shape=bias_shape)
        assert bool(specialized.configs(given, SM_90A)) == (specialized.unsupported(given, SM_90A) is None)
        assert choose(given, None, SM_90A).predicted_us > 0


def test_one_token_has_no_next_one_to_be_apart_from():
    one = problem(q_len=1, layouts=Layouts(q=View(2 * 4 * 64, 0, 256, 64, 0)))
    assert specialized.unsupported(one, SM_90A) is None
    assert "repeats one token" in specialized.unsupported(problem(layouts=one.layouts), SM_90A)


@pytest.mark.parametrize("template", [specialized, block_wise])
def test_a_bias_is_indexed_in_32_bits(template):
    long = problem(batch=1, q_heads=40, kv_heads=40, q_len=8192, kv_len=8192, bias_shape=(1, 40, 8192, 8192))
    assert re.search("bias .*32-bit", template.unsupported(long, SM_90A))
    assert template.unsupported(problem(q_len=8192, kv_len=8192, bias_shape=(1, 1, 8192, 8192)), SM_90A) is None
