"""A user's own templates and rules in a search: tuned beside the project's, in the log by their names, replayed."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import tvm
from tvm import te

import stof_tvm
from relax_passes.tuned_choices import TunedChoices
from stof_tvm import compiler
from stof_tvm.errors import InputError
from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.search.state import Options
from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels.fusion.problem import RowProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.template import Operands
from tir_kernels.tuning.template_space import TEMPLATES, from_decisions

LLVM = parse_target("llvm")


@dataclass(frozen=True)
class Config:
    unroll: int

    @property
    def label(self) -> str:
        return f"unrolled {self.unroll} times"


class DoubledSum:
    """x + y + y in one loop."""

    NAME, TARGET_KIND, Config = "doubled-sum", "llvm", Config

    @staticmethod
    def unsupported(problem, target) -> str | None:
        wanted = (Step("add", "matrix"), Step("add", "matrix"))
        is_ours = type(problem) is RowProblem and problem.steps == wanted and problem.norm is None
        return None if is_ours else "it is no doubled sum"

    @staticmethod
    def configs(problem, target) -> list[Config]:
        return [Config(1), Config(4)]

    @staticmethod
    def predict_us(problem, config, target, forms=None) -> float:
        return 0.5

    @staticmethod
    def operands(problem, config, target, mask=None) -> Operands:
        return Operands()

    @staticmethod
    def instantiate(problem, config, target):
        x, y, z = (te.placeholder((problem.m, problem.n), problem.dtype, name=name) for name in "xyz")
        out = te.compute((problem.m, problem.n), lambda i, j: x[i, j] + y[i, j] + z[i, j], name="out")
        sch = tvm.s_tir.Schedule(te.create_prim_func([x, y, z, out]))
        _, inner = sch.get_loops(sch.get_sblock("out"))
        _, unrolled = sch.split(inner, [None, config.unroll])
        sch.unroll(unrolled)
        return sch.mod["main"]


class Model(torch.nn.Module):
    def forward(self, x, y, z):
        return x + y + z


INPUTS = tuple(torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_template_is_tuned_and_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # one process compiles: each starts for seconds
    ran = []

    @tvm.transform.module_pass(opt_level=0)
    def rule(mod, _):
        ran.append(mod)
        return mod

    own = {"templates": [DoubledSum], "rules": [rule]}
    limits = {"max_trials": 2, "progress": False, "options": Options(cost_model=False)}
    result = stof_tvm.tune(Model(), LLVM, INPUTS, work_dir=tmp_path, **limits, **own)
    (task,) = result.report.tasks
    assert (task.trials, task.failures) == (2, {}) and ran
    log = TuningLog(tmp_path, LLVM)
    (key,) = log.keys
    records = log.records(key)
    assert {record.decisions["unroll"] for record in records} == {1, 4}
    assert {record.decisions["template"] for record in records} == {"llvm doubled-sum"}
    engine = stof_tvm.build(Model(), LLVM, INPUTS, tuning_logs=tmp_path, **own)
    (segment,) = engine.report().segments
    assert segment.kernel == "doubled-sum" and segment.reason.startswith("tuned: ")
    torch.testing.assert_close(engine(*INPUTS), sum(INPUTS))


def test_a_template_whose_choice_no_record_can_hold_is_refused(tmp_path):
    for config in (None, SimpleNamespace, dataclass(type("Config", (), {"__annotations__": {"name": str}}))):
        odd = type("Odd", (DoubledSum,), {"Config": config})
        with pytest.raises(InputError, match="doubled-sum.*dataclass of integers"):
            stof_tvm.tune(Model(), LLVM, INPUTS, work_dir=tmp_path, templates=[odd])


DECISIONS = {"template": "llvm doubled-sum", "unroll": 4}


def test_a_record_names_templates_that_it_is_given():
    assert from_decisions(DECISIONS, [DoubledSum]) == (DoubledSum, Config(4))
    with pytest.raises(InputError, match="there is no template 'llvm doubled-sum'"):
        from_decisions(DECISIONS)


def test_of_two_templates_of_a_name_the_later_is_found():
    other = type("Other", (DoubledSum,), {})
    assert from_decisions(DECISIONS, [DoubledSum, other])[0] is other
    unnamed = type("Unnamed", (DoubledSum,), {"Config": None})  # no record holds its choice
    assert from_decisions(DECISIONS, [DoubledSum, unnamed])[0] is DoubledSum


class LogOfOne:
    """A tuning log whose only record is of a template that this project does not have."""

    def may_hold(self, problem):
        return True

    def ranked(self, workload, gpu):
        return [SimpleNamespace(decisions=DECISIONS, us=1.5, gpu="a CPU", location="log:1", trace=[[], []])]

    def scheme(self, key, gpu):
        return None


def test_builds_in_two_threads_do_not_see_each_others_templates(monkeypatch):
    def tuned(_logs, target, templates):
        return TunedChoices(LogOfOne(), target, templates=templates)

    monkeypatch.setattr(compiler, "tuned_choices", tuned)
    before = dict(TEMPLATES)
    first, second = (type(name, (DoubledSum,), {"seen": []}) for name in ("First", "Second"))
    for own in (first, second):
        own.instantiate = staticmethod(lambda *a, own=own: own.seen.append(1) or DoubledSum.instantiate(*a))

    def build(templates):
        return stof_tvm.build(Model(), QUICK_LLVM, INPUTS, templates=templates, verify=False).report()

    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(build, [[first], [second], []]))
    for report in reports[:2]:
        assert [row.reason for row in report.segments] == ["tuned: 1.5 µs on a CPU (log:1)"]
    assert len(first.seen) == len(second.seen) == 1
    assert [row.kernel for row in reports[2].segments] == ["default"]
    assert before == TEMPLATES
