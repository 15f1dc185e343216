"""Builds that replay a log: the recorded kernels and scheme, the same in every process, without measuring."""

import subprocess
import sys
from pathlib import Path

import pytest

from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.logs.replay import replay_lines, tuned_choices
from tests.stof_tvm.tuning import replayed
from tests.stof_tvm.tuning.replayed import MASK, TARGET, asked_for, built, source_hash
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import InputError, TuningLogError
from tir_kernels.fusion.problem import RowProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.tuning.attention_spaces import attention_spaces
from tir_kernels.tuning.template_space import fusion_spaces, trace_for
from tir_kernels.tuning.workload import fusion_workload, problem_of

ROOT = Path(__file__).parents[4]
GPU = "NVIDIA H200"


def write_log(folder) -> dict:
    """Records of configurations that no default is, and of a scheme; the configurations by workload's problem."""
    asked, log, written = asked_for(), TuningLog(folder, TARGET), {}
    for workload in asked.workloads:
        problem = problem_of(workload)
        if problem is None:
            continue
        is_attention = isinstance(problem, AttentionProblem)
        spaces = attention_spaces(problem, MASK, TARGET) if is_attention else fusion_spaces(problem, TARGET)
        space = spaces[-1]
        config = next(c for c in reversed(space.configs) if c != space.configs[0])
        log.add(workload, trace_for(workload, space, config), 12.5, GPU)
        log.add(workload, trace_for(workload, space, space.configs[0]), 14.5, GPU)
        written[problem] = config
    (key,) = asked.graphs
    log.save_scheme(key, "0x122", 99.0, GPU)
    return written


@pytest.mark.slow
def test_a_fresh_process_replays_the_same_sources(tmp_path):
    written = write_log(tmp_path)
    assert {type(problem).__name__ for problem in written} == {"AttentionProblem", "GemmProblem", "RowProblem"}
    engine = built(tmp_path)
    report = engine.report()
    (site,) = report.sites
    labels = {config.label for config in written.values()}
    assert site.measured_us == 12.5 and site.config in labels and "tuned: 12.5 µs on NVIDIA H200" in site.reason
    kernels = [segment for segment in report.segments if segment.predicted_us is not None]
    assert kernels and all(segment.config in labels and segment.measured_us == 12.5 for segment in kernels)
    assert report.fusion_scheme == "0x122" and "fusion scheme: 99.0 µs on NVIDIA H200" in report.tuning[0]
    assert source_hash(engine) != source_hash(built(False))
    command = [sys.executable, replayed.__file__, str(tmp_path)]
    fresh = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=True)
    assert fresh.stdout.split()[-1] == source_hash(engine)


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_nothing_is_replayed_where_no_log_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tuned_choices(None, parse_target("cuda -arch=sm_86")) is None
    assert tuned_choices(False, TARGET) is None
    assert replay_lines(None) == ()


def test_the_working_directory_s_log_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = RowProblem(64, 64, "float16", (Step("gelu"),))
    workload = fusion_workload(problem)
    (space,) = fusion_spaces(problem, TARGET)
    TuningLog("tuning_logs", TARGET).add(workload, trace_for(workload, space, space.configs[-1]), 3.0, GPU)
    found = tuned_choices(None, TARGET).fusion(problem)
    assert found.config == space.configs[-1]
    assert found.reason == "tuned: 3.0 µs on NVIDIA H200 (sm_80/database_tuning_record.json:1)"
    assert tuned_choices(False, TARGET) is None


def test_two_gpus_side_by_side(tmp_path, monkeypatch):
    """Each build takes what was measured on its own GPU; on a third it takes the fastest."""
    problem = RowProblem(64, 64, "float16", (Step("gelu"),))
    workload = fusion_workload(problem)
    (space,) = fusion_spaces(problem, TARGET)
    times = {"NVIDIA H200": (3.0, 9.0), "NVIDIA A100": (8.0, 7.0)}
    for gpu, (first, last) in times.items():
        log = TuningLog(tmp_path, TARGET)
        log.add(workload, trace_for(workload, space, space.configs[0]), first, gpu)
        log.add(workload, trace_for(workload, space, space.configs[-1]), last, gpu)
        log.save_scheme("graph", "0x4f" if gpu == GPU else "0x4d", first + last, gpu)
    for gpu, config, scheme in (
        (GPU, space.configs[0], "0x4f"),
        ("NVIDIA A100", space.configs[-1], "0x4d"),
        ("NVIDIA L4", space.configs[0], "0x4f"),
    ):
        monkeypatch.setattr("stof_tvm.tuning.logs.replay.local_gpu_name", lambda: gpu)
        tuned = tuned_choices(tmp_path, TARGET)
        found = tuned.fusion(problem)
        assert found.config == config and tuned.scheme("graph").scheme == scheme
        assert found.gpu == (gpu if gpu in times else GPU) and not tuned.notes


def test_a_given_folder_must_exist(tmp_path):
    with pytest.raises(TuningLogError, match="is no folder"):
        tuned_choices(tmp_path / "missing", TARGET)
    with pytest.raises(InputError, match="True"):
        tuned_choices(True, TARGET)
    assert replay_lines(tuned_choices(tmp_path, TARGET)) == (
        "log sm_80; fusion scheme: no record; other functions with a schedule: 0",
    )
