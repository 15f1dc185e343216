"""Spaces of the templates: their decisions, candidates, and what a chosen one names."""

import json

import pytest
import tvm
from tvm.s_tir import Schedule

from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import InputError
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.target import parse_target
from tir_kernels.template import config_to_json
from tir_kernels.tuning.decisions import decisions_of
from tir_kernels.tuning.template_space import (
    SpaceTraces,
    chosen,
    from_decisions,
    fusion_spaces,
    misfit,
    trace_for,
)
from tir_kernels.tuning.workload import fusion_workload

TARGET = parse_target("cuda -arch=sm_80")
GEMV = GemmProblem(4, 64, "float16", (Step("gelu"),), k=512)
MLP = MlpProblem(GEMV, GemmProblem(4, 512, "float16", k=64))


def test_spaces_of_all_templates_in_order():
    assert [space.template for space in fusion_spaces(GEMV, TARGET)] == [gemv_cuda, gemm_cuda]
    assert [space.template for space in fusion_spaces(MLP, TARGET)] == [mlp_cuda]
    norm = RowProblem(8, 64, "float16", (), Norm("layer_norm", 1e-5))
    assert [space.name for space in fusion_spaces(norm, TARGET)] == ["cuda row-norm"]
    assert fusion_spaces(norm, parse_target("llvm")) == []


def test_decisions_are_the_values_that_occur():
    space = fusion_spaces(GEMV, TARGET)[0]
    assert list(space.decisions) == ["columns", "warps", "unroll"]
    for name, values in space.decisions.items():
        assert list(values) == sorted({getattr(config, name) for config in space.configs})


def test_values_give_a_configuration_only_where_it_is_legal():
    space = fusion_spaces(GEMV, TARGET)[0]
    for config in space.configs:
        assert space.config(config_to_json(config)) == config
    assert space.config({"columns": 32, "warps": 16, "unroll": 8}) is None


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("problem", [GEMV, MLP], ids=lambda p: type(p).__name__)
def test_a_chosen_configuration_is_read_back(problem, position):
    workload = fusion_workload(problem)
    for space in fusion_spaces(problem, TARGET):
        config = space.configs[position]
        trace = trace_for(workload, space, config)
        assert chosen(trace) == (space.template, config)
        assert decisions_of(trace) == space.decisions_for(config)
        sch = Schedule(workload)
        trace.apply_to_schedule(sch, remove_postproc=False)
        assert chosen(sch) == chosen(sch.mod) == (space.template, config)


def test_traces_made_quickly_are_those_of_the_space():
    workload = fusion_workload(GEMV)
    for space in fusion_spaces(GEMV, TARGET):
        traces = SpaceTraces(workload, space)
        for config in space.configs[:: len(space.configs) // 4]:
            expected, made = Schedule(workload, debug_mask="none"), traces.schedule(config)
            space.schedule(expected, config)
            assert json.dumps(plain(made.trace)) == json.dumps(plain(expected.trace))
            tvm.ir.assert_structural_equal(made.mod, expected.mod)


def plain(trace):
    return json.loads(json.dumps(trace.as_json(), default=lambda x: getattr(x, "value", x)))


def test_a_random_schedule_decides_each_field_among_its_values():
    space = fusion_spaces(GEMV, TARGET)[0]
    seen = set()
    for seed in range(1, 20):
        sch = Schedule(fusion_workload(GEMV), seed=seed)
        space.schedule(sch)
        values = config_to_json(chosen(sch)[1])
        assert all(values[name] in candidates for name, candidates in space.decisions.items())
        seen.add(tuple(values.values()))
    assert len(seen) > 5


def test_a_configuration_outside_the_space_has_no_trace():
    space = fusion_spaces(GEMV, TARGET)[0]
    with pytest.raises(InputError, match="is none of the"):
        trace_for(fusion_workload(GEMV), space, gemv_cuda.Config(8, 64, 1))


def test_nothing_is_chosen_without_annotations():
    workload = fusion_workload(GEMV)
    assert chosen(workload) is None and chosen(Schedule(workload).trace) is None


@pytest.mark.parametrize(
    "decisions, message",
    [
        ({"template": "cuda hgemm"}, "there is no template 'cuda hgemm'; there are: llvm block-wise"),
        ({}, "there is no template 'None'"),
        ({"template": "cuda gemv", "colour": 3}, "has no field colour"),
        ({"template": "cuda gemv", "columns": 8}, "missing"),
    ],
)
def test_decisions_of_another_version_are_refused(decisions, message):
    with pytest.raises(InputError, match=message):
        from_decisions(decisions)


def test_what_fits_and_why_not():
    norm = RowProblem(8, 64, "float16", (), Norm("layer_norm", 1e-5))
    config = row_norm_cuda.configs(norm, TARGET)[-1]
    assert misfit(row_norm_cuda, norm, config, TARGET) is None
    assert "is not for llvm" in misfit(row_norm_cuda, norm, config, parse_target("llvm"))
    assert "no elementwise chain" in misfit(row_norm_cuda, GEMV, config, TARGET)
    assert "is no configuration of cuda gemv" in misfit(gemv_cuda, GEMV, gemv_cuda.Config(8, 64, 1), TARGET)


def test_attention_fits_at_any_token_stride():
    problem = AttentionProblem(1, 2, 2, 512, 512, 64, 64, "float16", 0.125)
    for stride in (1, 4):
        assert misfit(block_wise_cuda, problem, BlockWiseConfig(64, 64, 4, 2, stride), TARGET) is None
    assert misfit(block_wise_cuda, problem, BlockWiseConfig(64, 64, 5, 2), TARGET) is not None
