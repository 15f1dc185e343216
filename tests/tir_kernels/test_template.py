"""The contract of kernel templates: every one that is registered has the same names, arguments and meanings."""

import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from tir_kernels.attention import registry as attention
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.template import AttentionTemplate
from tir_kernels.errors import InputError
from tir_kernels.fusion import registry as fusion
from tir_kernels.fusion.group.problem import GroupProblem, Tensor, Value
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.fusion.sorting.problem import MergeProblem, SortProblem
from tir_kernels.target import parse_target
from tir_kernels.template import Operands, Template, config_from_json, config_to_json, has_json, template_name

TARGETS = {"llvm": parse_target("llvm"), "cuda": parse_target("cuda -arch=sm_90a")}
NORM = Norm("layer_norm", 1e-5)
PROBLEMS = [
    AttentionProblem(1, 2, 2, 16, 128, 64, 64, "float16", 0.125),
    GemmProblem(8, 64, "float16", (Step("gelu"),), k=64),
    GemmProblem(64, 64, "float16", (), NORM, k=64),
    MlpProblem(GemmProblem(64, 64, "float16", k=64), GemmProblem(64, 64, "float16", k=64)),
    RowProblem(8, 64, "float16", (), NORM),
    RowProblem(8, 64, "float16", (Step("gelu"),)),
    EmbeddingProblem(8, 64, "float16", (Table(10),)),
    RotaryProblem(1, 8, 2, 2, 64, "float16"),
    GroupedProblem(8, 64, 64, 4, "float16"),
    GroupProblem((Tensor((8, 64), "float16"),), (Value("permute", (0,), (64, 8), "float16", (1, 0)),), (1,)),
    GroupProblem((Tensor((8, 64), "float32"),), (Value("sum", (0,), (8,), "float32", (1,)),), (1,)),
    SortProblem(8, 64, 64, 8, "float16", descending=True),
    MergeProblem(1, 4096, 1024, 4096, "int64", ranks=True),
]
TEMPLATES = [*attention.TEMPLATES, *fusion.TEMPLATES]


def methods_of(contract) -> dict:
    return {name: x for name, x in vars(contract).items() if inspect.isfunction(x) and not name.startswith("_")}


@pytest.mark.parametrize("template", TEMPLATES, ids=template_name)
def test_names_and_arguments_are_the_contract_s(template):
    methods = methods_of(Template)
    if template in attention.TEMPLATES:
        methods |= methods_of(AttentionTemplate)
        assert isinstance(template.TAKES_TOKEN_STRIDES, bool)
    assert len(methods) >= 5
    for name, method in methods.items():
        _, *expected = inspect.signature(method).parameters.values()
        given = inspect.signature(getattr(template, name)).parameters.values()
        assert [(x.name, x.default) for x in given] == [(x.name, x.default) for x in expected], name
    assert template.TARGET_KIND in TARGETS and has_json(template.Config)


def test_names_are_unique():
    assert len({template_name(template) for template in TEMPLATES}) == len(TEMPLATES)


@pytest.mark.parametrize("template", TEMPLATES, ids=template_name)
def test_configurations_operands_and_predictions(template):
    target = TARGETS[template.TARGET_KIND]
    registry = attention if template in attention.TEMPLATES else fusion
    problems = [p for p in PROBLEMS if isinstance(p, AttentionProblem) == (registry is attention)]
    computed = [problem for problem in problems if template.unsupported(problem, target) is None]
    assert computed
    for problem in computed:
        configs = template.configs(problem, target)
        assert len(set(configs)) == len(configs) > 0
        for config in configs:
            assert isinstance(config, template.Config) and config.label
            assert config_from_json(template, config_to_json(config)) == config
        operands = template.operands(problem, configs[0], target)
        assert all(isinstance(x, np.ndarray) and x.size for x in operands.arrays)
        assert len(operands.arrays) == len(operands.constants) + len(operands.workspace)
        assert not any(x.any() for x in operands.arrays[len(operands.constants) :])
        assert template.predict_us(problem, configs[0], target) > 0
        if registry is attention:
            assert template.worth_predicting(configs) and template.worth_measuring(configs)[0] in configs
            forms = MaskForms(problem)
            assert template.predict_us(problem, configs[0], target, forms) == template.predict_us(
                problem, configs[0], target
            )


def test_a_token_stride_is_legal_exactly_where_a_template_takes_one():
    for template in attention.TEMPLATES:
        target = TARGETS[template.TARGET_KIND]
        config = template.configs(PROBLEMS[0], target)[0]
        assert config.token_stride == 1
        if template.TAKES_TOKEN_STRIDES:
            assert replace(config, token_stride=2).token_stride == 2
        else:
            assert "token_stride" not in config_to_json(config)


def test_operands_as_arrays():
    lists = np.arange(3, dtype=np.int32)
    operands = Operands.of([lists], [np.ones((2, 4), np.float32)])
    assert operands.workspace == (((2, 4), "float32"),)
    first, second = operands.arrays
    assert first is lists and second.shape == (2, 4) and second.dtype == np.float32 and not second.any()


@dataclass(frozen=True)
class Pair:
    a: int
    b: bool = False


def test_configurations_as_json():
    template = SimpleNamespace(NAME="pair", TARGET_KIND="llvm", Config=Pair)
    assert config_to_json(Pair(3, True)) == {"a": 3, "b": 1}
    assert config_from_json(template, {"a": 3}) == Pair(3)
    assert config_from_json(template, {"a": 3, "b": 1}).b is True
    with pytest.raises(InputError, match="'llvm pair' has no field c"):
        config_from_json(template, {"a": 3, "c": 1})
    with pytest.raises(InputError, match="missing"):
        config_from_json(template, {"b": 1})
    assert not has_json(dataclass(type("Named", (), {"__annotations__": {"name": str}})))
