"""A kind of problem and a template that are added: one module each, and one line of its registry."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import tvm
from tvm import te

from stof_tvm.tuning.measuring.cases import case_of
from stof_tvm.tuning.measuring.job import KernelJob
from stof_tvm.tuning.task import fusion_task
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.errors import InputError
from tir_kernels.fusion import registry as templates
from tir_kernels.problems import registry as kinds
from tir_kernels.target import parse_target
from tir_kernels.template import Operands, template_name
from tir_kernels.tuning.problem_json import problem_from_json, problem_to_json
from tir_kernels.tuning.template_space import TEMPLATES, chosen, misfit, trace_for
from tir_kernels.tuning.workload import fusion_workload, problem_of

ROOT = Path(__file__).parents[2]
LLVM = parse_target("llvm")


@dataclass(frozen=True)
class Table:
    size: int


@dataclass(frozen=True)
class OuterSum:
    """x (m,) and y (n,), then out (m, n): out[i, j] = x[i] + y[j]."""

    rows: Table
    columns: Table
    dtype: str = "float32"

    @property
    def inputs(self) -> list:
        return [((table.size,), self.dtype) for table in (self.rows, self.columns)]

    @property
    def outputs(self) -> list:
        return [((self.rows.size, self.columns.size), self.dtype)]


class OuterSumKind:
    """The kind `OuterSum`: what a module of tir_kernels/problems holds."""

    PROBLEM, PARTS = OuterSum, (Table,)

    @staticmethod
    def sizes(problem):
        return {"m": problem.rows.size, "n": problem.columns.size}

    @staticmethod
    def title(problem):
        return f"outer sum {problem.rows.size}x{problem.columns.size}"

    @staticmethod
    def tensors(problem):
        x, y = (te.placeholder(shape, dtype, name=name) for name, (shape, dtype) in zip("xy", problem.inputs))
        return [x, y, te.compute(problem.outputs[0][0], lambda i, j: x[i] + y[j], name="out")]

    @staticmethod
    def draw(problem, random):
        return [random.normal(*spec) for spec in problem.inputs]

    @staticmethod
    def reference(problem, inputs, torch, keep=None):
        return [inputs[0][:, None] + inputs[1]]


@dataclass(frozen=True)
class Config:
    unroll: int

    @property
    def label(self) -> str:
        return f"unrolled {self.unroll} times"


class OuterSumTemplate:
    """What a module of tir_kernels/fusion holds."""

    NAME, TARGET_KIND, Config = "outer-sum", "llvm", Config

    @staticmethod
    def unsupported(problem, target) -> str | None:
        return None if isinstance(problem, OuterSum) else "it is no outer sum"

    @staticmethod
    def configs(problem, target) -> list[Config]:
        return [Config(1), Config(4)]

    @staticmethod
    def predict_us(problem, config, target, forms=None) -> float:
        return 1.0 / config.unroll

    @staticmethod
    def operands(problem, config, target, mask=None) -> Operands:
        return Operands()

    @staticmethod
    def instantiate(problem, config, target):
        sch = tvm.s_tir.Schedule(te.create_prim_func(OuterSumKind.tensors(problem)))
        _, inner = sch.get_loops(sch.get_sblock("out"))
        _, unrolled = sch.split(inner, [None, config.unroll])
        sch.unroll(unrolled)
        return sch.mod["main"]


PROBLEM = OuterSum(Table(3), Table(8))


@pytest.fixture
def registered(monkeypatch):
    """The two lines."""
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, OuterSumKind))
    monkeypatch.setattr(templates, "TEMPLATES", (*templates.TEMPLATES, OuterSumTemplate))
    monkeypatch.setitem(TEMPLATES, template_name(OuterSumTemplate), OuterSumTemplate)  # as when they are imported


def test_logs_name_the_problem(registered):
    text = problem_to_json(PROBLEM)
    assert problem_from_json(text) == PROBLEM
    assert problem_of(fusion_workload(PROBLEM)) == PROBLEM
    with pytest.raises(InputError):
        problem_from_json(text.replace("OuterSum", "InnerSum"))


def test_searches_choose_and_check_its_kernels(registered, tmp_path):
    task = fusion_task(PROBLEM, LLVM)
    (space,) = task.spaces
    assert space.template is OuterSumTemplate and task.predicted_us == 1.0
    for config in space.configs:
        assert chosen(trace_for(task.mod, space, config)) == (OuterSumTemplate, config)
        assert misfit(OuterSumTemplate, PROBLEM, config, LLVM) is None
        with quick_script():
            function = OuterSumTemplate.instantiate(PROBLEM, config, LLVM).with_attr("global_symbol", "main")
        kernel = tvm.compile(tvm.IRModule({"main": function}), target=LLVM).jit()["main"]
        job = KernelJob(template_name(OuterSumTemplate), PROBLEM, config)
        case = case_of(job, tmp_path, torch.device("cpu"), seed=0)
        case.poison()
        assert case.mistake() is not None
        kernel(*case.arguments(job)(case.sets[0]))
        assert case.mistake() is None


def test_without_its_line_no_kind_is_known():
    with pytest.raises(InputError, match="no problem of the kernel templates"):
        problem_from_json(problem_to_json(PROBLEM))


@pytest.mark.parametrize("name", ["rotary", "embedding"])
def test_the_modules_that_name_a_kind(name):
    """Its own, a template's, which defines the problem here, and the matcher that finds it in models."""
    naming = [
        str(path.relative_to(ROOT))
        for package in ("stof_tvm", "relax_passes", "tir_kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
        if re.search(rf"\b{name.capitalize()}Problem\b", path.read_text())
    ]
    assert naming == [
        f"relax_passes/fusion/matching/{name}.py",
        f"tir_kernels/fusion/rows/{name}.py",
        f"tir_kernels/problems/{name}.py",
    ]
