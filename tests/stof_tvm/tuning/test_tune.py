"""`tune` end to end: with times that are made up for a GPU that is not here, and for real on LLVM."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import stof_tvm
from benchmarks.tuning.strategies import replay_trace
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.search.model_tasks import model_tasks
from stof_tvm.tuning.search.state import Options, Search
from stof_tvm.tuning.tune import run_search
from tests.models.families import BertLike
from tests.robustness.processes import Process
from tests.stof_tvm.tuning.fakes import CUDA, FakeMeasurer, made_up_us
from tir_kernels.attention.registry import templates_for
from tir_kernels.errors import InputError, MaskError
from tir_kernels.target import parse_target

ROOT = Path(__file__).parents[3]
LENGTH = 16
IDS = torch.arange(LENGTH)[None]


def small_model(dtype=torch.float32, dim=32):
    torch.manual_seed(0)
    return BertLike(dim=dim, heads=2, layers=1, length=LENGTH).eval().to(dtype)


# -- a GPU's search, its times made up ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_tasks():
    mod = import_model(small_model(torch.float16, 64), (IDS,), {}).mod
    return model_tasks(mod, CUDA, SiteMasks(masks.sliding_window(3)))


def us_or_default(decisions) -> float:
    return made_up_us(decisions) if "template" in decisions else 5.0


def search(folder, us=us_or_default, max_trials=80, **options) -> Search:
    log = TuningLog(folder, CUDA)
    return Search(log, FakeMeasurer(us, log), Options(**options), 0, max_trials)


def test_a_model_has_tasks_for_attention_and_operators(gpu_tasks):
    (attention,) = gpu_tasks.attentions
    assert attention.count == 1 and attention.whole.spaces
    assert [op.name for op in gpu_tasks.graph.operators].count("matmul") == 5


def test_a_search_finds_better_than_the_defaults_and_keeps_the_scheme(gpu_tasks, tmp_path):
    result = run_search(search(tmp_path), gpu_tasks, None)
    assert result.best["us"] < result.best["default_us"] and result.best["known_us"] is None
    assert len(result.history) == 80 and not result.is_interrupted
    assert list(TuningLog(tmp_path, CUDA).schemes.values())[0][0].scheme == result.best["scheme"]
    assert json.dumps(result.report.to_dict()) and "<svg" in result.report.html()


def test_a_seed_decides_everything(gpu_tasks, tmp_path):
    one, other = (run_search(search(tmp_path / name), gpu_tasks, None) for name in "ab")
    assert [(t.task, t.us) for t in one.history] == [(t.task, t.us) for t in other.history]
    assert one.best == other.best


def test_stage_one_takes_what_is_measured_to_be_faster(gpu_tasks, tmp_path):
    """Norms that cost next to nothing when they are fused into products: the scheme must fuse them."""
    fused = lambda made: 0.1 if made.get("template") == "cuda gemm-norm" else us_or_default(made)
    result = run_search(search(tmp_path, fused, 200), gpu_tasks, None)
    apart = run_search(search(tmp_path / "none", fused, 200, stage_one=False), gpu_tasks, None)
    assert any(step.kept for step in result.steps) and not apart.steps
    assert result.best["us"] < apart.best["us"]


def test_the_known_scheme_is_where_the_next_search_starts(gpu_tasks, tmp_path):
    fused = lambda made: 0.1 if made.get("template") == "cuda gemm-norm" else us_or_default(made)
    first = run_search(search(tmp_path, fused, 200), gpu_tasks, None)
    again = run_search(search(tmp_path, fused, 40, stage_one=False), gpu_tasks, None)
    assert again.best["scheme"] == first.best["scheme"]


def test_metaschedule_alone_is_compared_with_the_same_defaults(gpu_tasks, tmp_path):
    options = {"strategy": replay_trace, "stage_one": False}
    alone = run_search(search(tmp_path / "alone", max_trials=40, defaults=False, **options), gpu_tasks, None)
    helped = run_search(search(tmp_path / "helped", max_trials=40, **options), gpu_tasks, None)
    assert alone.best["default_us"] == helped.best["default_us"]
    assert len(alone.history) == len(helped.history) == 40
    first = next(trial.model_us for trial in helped.history if trial.model_us is not None)
    assert first == helped.best["default_us"]
    assert first not in [trial.model_us for trial in alone.history]


def test_ctrl_c_gives_what_there_is(gpu_tasks, tmp_path):
    interrupted = search(tmp_path)
    wait, calls = interrupted.measurer.wait, []

    def wait_or_interrupt(futures):
        calls.append(futures)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return wait(futures)

    interrupted.measurer.wait = wait_or_interrupt
    result = run_search(interrupted, gpu_tasks, None)
    assert result.is_interrupted and result.history and result.best["us"] > 0


# -- a CPU's search, for real ------------------------------------------------------------------------------------------


class Attend(torch.nn.Module):
    """An attention, which has eight configurations, and a product, which has any number."""

    def forward(self, q, k, v, w):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v) @ w


def attend_call(length=64):
    q, k, v = (torch.randn(1, 4, length, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    return Attend(), (q, k, v, q[0, 0, :32] / 6), masks.sliding_window(length)


def bert_call():
    return small_model(), (IDS,), masks.sliding_window(3)


def tuned(folder, call, **options):
    """Compiled in one process: each takes five seconds to start."""
    options = {"progress": False, "options": Options(cost_model=False)} | options
    with mock.patch.object(os, "sched_getaffinity", lambda process: {0}):
        return stof_tvm.tune(call[0], "llvm", *call[1:], work_dir=folder, **options)


def _upside_down(predict_us, *choice) -> float:
    return -predict_us(*choice)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_gets_faster_and_stays_right(tmp_path, monkeypatch):
    """The analytical model is turned upside down, so that the default is the slower of two kernels by far."""
    for template in templates_for(parse_target("llvm")):
        monkeypatch.setattr(template, "predict_us", functools.partial(_upside_down, template.predict_us))
    call = attend_call(256)
    result = tuned(tmp_path, call, max_trials=8)
    assert result.best["us"] < 0.8 * result.best["default_us"]
    engine = stof_tvm.build(call[0], "llvm", *call[1:], tuning_logs=tmp_path)
    torch.testing.assert_close(engine(*call[1]), call[0](*call[1]), rtol=1e-4, atol=1e-5)
    (site,) = engine.report().sites
    assert site.measured_us <= result.best["us"] and site.reason.startswith("tuned")


def known(folder) -> int:
    """How many records a log has."""
    log = TuningLog(folder, parse_target("llvm"))
    return sum(len(log.records(key)) for key, _ in log.workloads())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_that_was_killed_goes_on(tmp_path):
    process = Process(lambda tell: tuned(tmp_path, attend_call(), max_trials=500))
    deadline = time.monotonic() + 300
    while known(tmp_path) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.kill()
    before = known(tmp_path)
    assert before >= 4
    result = tuned(tmp_path, attend_call(), max_trials=before + 2)
    assert sum(not trial.is_cached for trial in result.history) == known(tmp_path) - before > 0
    assert sum(task.trials for task in result.report.tasks) >= known(tmp_path)


ON_ONE_CORE = """
import os, sys
from stof_tvm.cli import main
from stof_tvm.tuning.measuring import builder
builder.NICENESS = 0
os.sched_setaffinity(0, {int(sys.argv[1])})
sys.exit(main(sys.argv[2:]))
"""


def start(folder, call, *more) -> subprocess.Popen:
    """`stof tune` of what the function `call` returns, on one of the cores there are."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", ON_ONE_CORE, str(core)]
    command += ["tune", f"{__name__}:{call.__name__}", "--target", "llvm", "--json", "--work-dir", str(folder), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_records(folder, process, count):
    while known(folder) < count:
        assert process.poll() is None, "the search ended early"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_searches_share_a_log(tmp_path):
    process = start(tmp_path, bert_call, "--max-trials", "8", "--seed", "1")
    wait_for_records(tmp_path, process, 1)
    here = tuned(tmp_path, bert_call(), max_trials=5, seed=2)
    output = process.communicate()[0]
    assert process.returncode == 0
    there = json.loads(output)["history"]
    cached = [trial["is_cached"] for trial in there] + [trial.is_cached for trial in here.history]
    assert len(cached) == 8 + 5
    assert known(tmp_path) >= cached.count(False) / 2 > 0


@pytest.mark.parametrize(
    "limits", [{"max_trials": 0}, {"max_trials": -1}, {"max_trials": 2.5}, {"max_seconds": 0}, {"max_seconds": "5"}]
)
def test_limits_that_leave_nothing_are_refused(tmp_path, limits):
    with pytest.raises(InputError, match="max_"):
        stof_tvm.tune(torch.nn.Linear(2, 2), "llvm", (torch.ones(2, 2),), work_dir=tmp_path, **limits)


@pytest.mark.parametrize("mask", [masks.causal(), {"decoder.*": masks.causal()}])
def test_a_mask_that_reaches_no_attention_is_refused_before_any_trial(mask, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with pytest.raises(MaskError, match="reaches no attention"):
        stof_tvm.tune(model, "llvm", (torch.randn(4, 8),), mask, work_dir=tmp_path, max_trials=1)
