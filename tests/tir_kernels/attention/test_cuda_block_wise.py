"""The CUDA block-wise kernel as far as a machine without a GPU can prove it: every case generates the very source that
was verified on a GPU, and compiles for sm_80 and sm_90a without spilling a register."""

import functools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from tir_kernels.attention import block_wise_cuda
from tir_kernels.attention.cuda_geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.cuda_compile import cuda_source, resource_usage
from tir_kernels.target import parse_target

GPU_TESTS = Path(__file__).parents[2] / "gpu"
sys.path.insert(0, str(GPU_TESTS))
import all_cases  # noqa: E402
from attention_cases import CASES, DEFAULT, source_hash  # noqa: E402

MANIFEST = json.loads((GPU_TESTS / "verified.json").read_text())
FEW = [
    "bigbird b1 h2 384x384 d64 float16 scale 0.125 | 64x64 4 warps 2 stages",
    "random b1 h2 257x331 d64 float16 scale 0.125 | 128x64 4 warps 1 stages",
    "causal b1 h2 257x257 d80 float16 scale 0.1118 | 128x32 4 warps 3 stages",
    "window/per-batch-head b3 h6/1 300x300 d64 bfloat16 scale 0.125 | 64x64 4 warps 2 stages",
]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")


@functools.cache
def source(problem, config, arch="sm_80") -> str:
    target = parse_target(f"cuda -arch={arch}")
    func = block_wise_cuda.instantiate(problem, config, target).with_attr("global_symbol", "main")
    with target:
        return cuda_source(tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx"))


def case_named(label):
    return next(case for case in CASES if case.label == label)


def assert_verified(case):
    entry = MANIFEST["cases"][case.label]
    advice = "the generated CUDA differs from what was verified; run `python tests/gpu/verify.py` on a GPU"
    assert source_hash(source(case.problem, case.config, case.arch or "sm_80")) == entry["source"], advice


def assert_compiles_without_spills(case, arch):
    (usage,) = resource_usage(source(case.problem, case.config, case.arch or "sm_80"), arch)
    g = Geometry(case.problem, case.config)
    assert usage.spill_bytes == 0, usage
    assert g.min_blocks_per_sm * g.threads * usage.registers <= 65536


def test_manifest_lists_exactly_the_cases():
    assert list(MANIFEST["cases"]) == [case.label for case in all_cases.CASES]


def test_manifest_records_a_gpu_run_within_the_allowed_error():
    assert MANIFEST["gpu"].startswith("NVIDIA") and MANIFEST["date"] and MANIFEST["driver"]
    for label, entry in MANIFEST["cases"].items():
        # The second term is one rounding of an output of size 4: rows that copy a single value.
        assert 0 <= entry["error"] <= max(2 * entry["half_error"], 4 * (2**-8 if "bfloat16" in label else 2**-10)), (
            label
        )
        assert entry["time_us"] > 0, label


@pytest.mark.parametrize("label", FEW)
def test_source_is_the_verified_one(label):
    assert_verified(case_named(label))


def test_source_is_the_same_for_every_architecture():
    case = case_named(FEW[0])
    assert source_hash(source(case.problem, case.config, "sm_90a")) == source_hash(source(case.problem, case.config))


def test_source_hash_sees_a_change_in_the_kernel_and_in_a_helper():
    text = source(case_named(FEW[0]).problem, case_named(FEW[0]).config)
    assert source_hash(text.replace("for (int p", "for (int q")) != source_hash(text)
    assert source_hash(text.replace("mma.sync", "mma.async")) != source_hash(text)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("label", FEW[:2])
def test_compiles_without_spills(label, arch):
    assert_compiles_without_spills(case_named(label), arch)


DISTINCT = list({(case.problem, case.config): case for case in CASES}.values())


# To compile: each configuration once, and whatever else the default one is asked to do.
HALVES = [case for case in DISTINCT if case.problem.dtype == "float16"]
TO_COMPILE = list({replace(case.config, token_stride=1): case for case in reversed(HALVES)}.values())
TO_COMPILE += [case for case in HALVES if case.config == DEFAULT and case not in TO_COMPILE]


@pytest.mark.slow  # generates some 350 kernels, close to a second each, and compiles 200, two to four seconds each
@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.label)
def test_every_source_is_the_verified_one_and_every_configuration_compiles_without_spills(case):
    assert_verified(case)
    if case in TO_COMPILE and shutil.which("nvcc") is not None:
        for arch in [case.arch] if case.arch else ["sm_80", "sm_90a"]:
            assert_compiles_without_spills(case, arch)


def problem(**changes):
    fields = dict(batch=2, q_heads=4, kv_heads=2, q_len=300, kv_len=300, head_dim=64, v_head_dim=64, dtype="float16")
    return AttentionProblem(**{**fields, "scale": 0.125, **changes})


SM_80, SM_86 = parse_target("cuda -arch=sm_80"), parse_target("cuda -arch=sm_86")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": "float32"}, "float16 or bfloat16"),
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


def test_kernel_declares_what_relax_needs():
    func = block_wise_cuda.instantiate(problem(bias_shape=(1, 4, 300, 300)), BlockWiseConfig(64, 64, 4, 2), SM_80)
    assert [func.attrs[k] for k in ("tirx.noalias", "op_pattern", "tirx.is_scheduled")] == [True, 8, True]
    assert len(func.params) == 10  # q, k, v, bias, work, entries, keep_bits, partials, arrivals, out
