"""Tuning on a GPU: candidates are right and timed, bad ones fail alone, a model gets faster and its log replays."""

from pathlib import Path

import pytest
import torch
from tvm.s_tir.meta_schedule.builder import BuilderInput
from tvm.s_tir.meta_schedule.runner import RunnerInput

import stof_tvm
from benchmarks.tuning.bert import bert_call
from stof_tvm import masks
from stof_tvm.tuning.measuring.builder import PoolBuilder
from stof_tvm.tuning.measuring.job import KernelJob, keep_mask, read_note, write_note
from stof_tvm.tuning.measuring.runner import ProcessRunner
from stof_tvm.tuning.search.sampler import schedule_of
from stof_tvm.tuning.task import attention_task, fusion_task
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step
from tir_kernels.target import local_cuda_arch, parse_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    builder = PoolBuilder(tmp_path_factory.mktemp("built"), local_cuda_arch(), workers=4)
    runner = ProcessRunner("cuda")
    builder.start()
    yield builder, runner
    builder.close()
    runner.close()


def built(machine, task, candidate):
    (result,) = machine[0].build([BuilderInput(schedule_of(task, *candidate).mod, parse_target())])
    assert result.error_msg is None
    return str(result.artifact_path)


def run(machine, library):
    (future,) = machine[1].run([RunnerInput(library, "cuda", [])])
    result = future.result()
    return result.run_secs and float(result.run_secs[0]), result.error_msg and str(result.error_msg)


PROBLEMS = [
    GemmProblem(128, 768, "float16", (Step("add", "row"), Step("gelu")), k=768),
    GemmProblem(100, 776, "bfloat16", (Step("add", "matrix"),), k=264, w_layout="kn"),
    RowProblem(131, 768, "float16", (Step("add", "matrix"),), Norm("layer_norm", 1e-5), keeps_sum=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_defaults_are_right_and_timed(machine, problem):
    task = fusion_task(problem, parse_target())
    seconds, reason = run(machine, built(machine, task, task.default))
    assert reason is None and 1e-6 < seconds < 1e-3


def test_wrong_numbers_and_refused_arguments_fail_alone(machine):
    task = fusion_task(PROBLEMS[0], parse_target())
    good = built(machine, task, task.default)
    other = GemmProblem(128, 768, "float16", (Step("add", "row"), Step("relu")), k=768)
    bad = built(machine, fusion_task(other, parse_target()), task.default)
    write_note(Path(bad).parent, read_note(Path(good).parent))
    assert "wrong numbers" in run(machine, bad)[1]
    # A kernel for more rows than its inputs have refuses them.
    large = GemmProblem(1 << 20, 768, "float16", PROBLEMS[0].steps, k=768)
    wild = built(machine, fusion_task(large, parse_target()), task.default)
    write_note(Path(wild).parent, KernelJob("cuda gemm", PROBLEMS[0], task.default[1]))
    assert run(machine, wild)[0] is None
    assert run(machine, good)[1] is None


def test_attention_of_every_template(machine):
    problem = AttentionProblem(1, 4, 4, 256, 256, 64, 64, "float16", 0.125)
    task = attention_task(problem, masks.bigbird(), parse_target())
    keep_mask(machine[0].folder, task.digest, task.mask)
    for space in task.spaces:
        seconds, reason = run(machine, built(machine, task, (space, space.configs[0])))
        assert reason is None and seconds < 1e-3


def test_a_model_gets_faster_and_its_log_replays(tmp_path):
    model, inputs = bert_call(1, 128, "cuda", torch.float16, layers=2)
    mask = masks.bigbird()
    result = stof_tvm.tune(model, None, inputs, mask, work_dir=tmp_path, max_trials=60, progress=False)
    assert result.best["us"] <= result.best["default_us"]
    failures = [reason for row in result.report.tasks for reason in row.failures]
    assert not [reason for reason in failures if "wrong numbers" in reason], failures
    tuned = stof_tvm.build(model, None, inputs, mask, tuning_logs=tmp_path)
    default = stof_tvm.build(model, None, inputs, mask, tuning_logs=False)
    assert "tuned" in str(tuned.report())
    torch.testing.assert_close(tuned(*inputs), default(*inputs), rtol=2e-2, atol=2e-2)
