"""What a CUDA kernel's PrimFunc says of itself, and its arguments that are left out."""

import pytest

from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.dependent_launch import FILLS_MULTIPROCESSORS
from tir_kernels.fusion.gemm import gemm
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows import norm
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_80")
PRODUCT, ROWS = GemmProblem(64, 64, "float16", k=64), RowProblem(8, 64, "float16", norm=Norm("rms_norm", 1e-6))


@pytest.mark.parametrize("template, problem, fills", [(gemm, PRODUCT, True), (norm, ROWS, False)])
def test_passes_leave_it_as_it_is(template, problem, fills):
    config = GemmConfig(64, 64, 32, 2, 2, 3) if template is gemm else norm.configs(ROWS, TARGET)[0]
    with quick_script():
        attributes = template.instantiate(problem, config, TARGET).attrs
    assert attributes["tirx.is_scheduled"] and attributes["tirx.noalias"] and attributes["op_pattern"] == 8
    assert str(attributes["global_symbol"]).startswith(template.NAME.replace("-", "_"))
    assert (FILLS_MULTIPROCESSORS in attributes) == fills


@pytest.mark.parametrize("steps, parameters", [((), 3), ((Step("add", "row"),), 4)])
def test_arguments_that_are_absent_are_left_out(steps, parameters):
    problem = GemmProblem(64, 64, "float16", steps, k=64)
    with quick_script():
        function = gemm.instantiate(problem, GemmConfig(64, 64, 32, 2, 2, 3), TARGET)
    assert len(function.params) == parameters
