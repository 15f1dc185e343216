"""Random groups: the kernel, run on the CPU, and the tensor expressions compute what PyTorch computes in float64."""

import pytest
import torch
import tvm
from tvm import te

from tests.gpu.group_cases import GroupCase
from tests.models.quick_llvm import QUICK_LLVM
from tests.tir_kernels.fusion.group.group_emulation import SM_80, assert_close, assert_right, expected
from tests.tir_kernels.fusion.group.random_groups import random_group
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.fusion.group import group as group_cuda
from tir_kernels.problems import group as group_kind

SEEDS = range(30)


def legal() -> dict[int, object]:
    problems = {seed: random_group(seed) for seed in SEEDS}
    return {seed: problem for seed, problem in problems.items() if group_cuda.unsupported(problem, SM_80) is None}


LEGAL = legal()


def test_most_random_groups_are_legal_and_the_others_only_for_their_norm():
    assert len(LEGAL) >= 20
    reasons = {group_cuda.unsupported(random_group(seed), SM_80) for seed in SEEDS} - {None}
    assert all("are no rows of a result" in reason for reason in reasons)


@needs_gxx
@pytest.mark.parametrize("seed", LEGAL)
def test_the_kernel(seed, tmp_path):
    assert_right(LEGAL[seed], tmp_path, seed=seed)


@pytest.fixture(scope="module")
def programs():
    """The tensor expressions of all groups, unscheduled, in one program."""
    functions = {f"main{seed}": te.create_prim_func(group_kind.tensors(random_group(seed))) for seed in SEEDS}
    functions = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    return tvm.compile(tvm.IRModule(functions), target=QUICK_LLVM)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tensor_expressions(seed, programs):
    problem = random_group(seed)
    inputs = GroupCase("", problem, None).make_inputs(seed, "cpu")
    outputs = [torch.full(shape, torch.nan).to(getattr(torch, dtype)) for shape, dtype in problem.outputs]
    programs[f"main{seed}"](*map(tvm.runtime.from_dlpack, (*inputs, *outputs)))
    assert_close(problem, outputs, expected(problem, inputs))
