"""Workloads: equal for equal problems, in every process, and whole again from their attributes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tvm.s_tir import meta_schedule as ms

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import InputError
from tir_kernels.fusion.problem import GemmProblem, Step
from tir_kernels.tuning.workload import attention_workload, fusion_workload, mask_of, primfunc_workload, problem_of

ROOT = Path(__file__).parents[3]
GEMM = GemmProblem(8, 16, "float16", (Step("gelu"),), k=32)
ATTENTION = AttentionProblem(1, 2, 2, 8, 8, 16, 16, "float16", 0.25)


def key(mod) -> str:
    return str(ms.database.Workload(mod).as_json()[0])


def test_problem_and_mask_are_read_back():
    assert problem_of(fusion_workload(GEMM)) == GEMM
    assert mask_of(fusion_workload(GEMM)) is None
    workload = attention_workload(ATTENTION, "0a1b")
    assert problem_of(workload) == ATTENTION and mask_of(workload) == "0a1b"


def test_different_problems_and_masks_are_different_workloads():
    keys = [key(fusion_workload(GEMM)), key(fusion_workload(replace(GEMM, m=9)))]
    keys += [key(fusion_workload(replace(GEMM, steps=(Step("scale", value=x),)))) for x in (1.0, 2.0)]
    keys += [key(attention_workload(ATTENTION, digest)) for digest in ("0a", "0b")]
    assert len(set(keys)) == 6


def test_equal_problems_are_one_workload_in_every_process():
    program = (
        "from tests.tir_kernels.tuning.test_workload import *\n"
        "print(key(fusion_workload(GEMM)), key(attention_workload(ATTENTION, '0a')))"
    )
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [key(fusion_workload(GEMM)), key(attention_workload(ATTENTION, "0a"))]
    assert other.stdout.split()[-2:] == expected


def test_a_function_of_any_name_is_one_workload():
    function = fusion_workload(GEMM)["main"].without_attr("stof.problem")
    renamed = primfunc_workload(function.with_attr("global_symbol", "fused_matmul"))
    assert key(renamed) == key(primfunc_workload(function.without_attr("global_symbol")))
    assert problem_of(renamed) is None


def test_a_problem_of_another_version_is_refused():
    function = fusion_workload(GEMM)["main"].with_attr("stof.problem", '{"is":"OldProblem"}')
    with pytest.raises(InputError, match="OldProblem"):
        problem_of(primfunc_workload(function))
