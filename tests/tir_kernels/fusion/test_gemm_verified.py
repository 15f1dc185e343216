"""The sources of the CUDA matrix-product kernels are those that ran on a GPU, within the allowed error."""

import json
import sys
from pathlib import Path

import pytest

from tests.tir_kernels.fusion.kernels import source

GPU_TESTS = Path(__file__).parents[2] / "gpu"
sys.path.insert(0, str(GPU_TESTS))
from attention_cases import source_hash  # noqa: E402
from gemm_cases import gemm_cases  # noqa: E402

MANIFEST = json.loads((GPU_TESTS / "verified.json").read_text())
CASES = gemm_cases()
FEW = CASES[::25]


def assert_verified(case):
    advice = "the generated CUDA differs from what was verified; run `python tests/gpu/verify.py` on a GPU"
    generated = source(case.template, case.problem, case.config, case.arch or "sm_80")
    assert source_hash(generated) == MANIFEST["cases"][case.label]["source"], advice


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.label)
def test_source_is_the_verified_one(case):
    assert_verified(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_source_is_the_verified_one():
    for case in CASES:
        assert_verified(case)


def test_errors_are_at_most_twice_those_of_half_precision():
    for case in CASES:
        entry = MANIFEST["cases"][case.label]
        assert 0 < entry["error"] <= 2 * entry["half_error"], case.label
        assert entry["time_us"] > 0


def test_source_is_the_same_for_every_architecture():
    case = CASES[0]
    first, second = (source(case.template, case.problem, case.config, arch) for arch in ("sm_80", "sm_90a"))
    assert source_hash(first) == source_hash(second)
