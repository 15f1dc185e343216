"""Building and running in processes: good candidates, and all the ways in which one can be bad."""

import os

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.builder import BuilderInput
from tvm.s_tir.meta_schedule.runner import RunnerInput
from tvm.script import tirx as T

from stof_tvm import masks
from stof_tvm.tuning.measuring.builder import NICENESS, WORKLOAD, PoolBuilder, workload_name
from stof_tvm.tuning.measuring.job import keep_mask
from stof_tvm.tuning.measuring.runner import ProcessRunner
from stof_tvm.tuning.search.sampler import schedule_of
from stof_tvm.tuning.task import attention_task
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.target import parse_target

pytestmark = pytest.mark.slow  # processes that import everything start first
SIZE = 32
SHAPE = (SIZE, SIZE)
LLVM = parse_target("llvm")


def product() -> tvm.IRModule:
    """A workload: c = a @ b."""
    a, b = (te.placeholder((SIZE, SIZE), "float32", name=name) for name in "ab")
    k = te.reduce_axis((0, SIZE), name="k")
    c = te.compute((SIZE, SIZE), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")})


def crash() -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer(SHAPE, "float32"), b: T.Buffer(SHAPE, "float32"), c: T.Buffer(SHAPE, "float32")):
        T.evaluate(T.call_extern("int32", "abort"))

    return main


def hang() -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer(SHAPE, "float32"), b: T.Buffer(SHAPE, "float32"), c: T.Buffer(SHAPE, "float32")):
        T.evaluate(T.call_extern("int32", "pause"))

    return main


def wrong() -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer(SHAPE, "float32"), b: T.Buffer(SHAPE, "float32"), c: T.Buffer(SHAPE, "float32")):
        for i, j in T.grid(SIZE, SIZE):
            c[i, j] = a[i, j] + b[i, j]

    return main


def uncompilable() -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer(SHAPE, "float32"), b: T.Buffer(SHAPE, "float32"), c: T.Buffer(SHAPE, "float32")):
        T.evaluate(T.tvm_storage_sync("shared"))

    return main


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    builder, runner = PoolBuilder(folder, workers=1), ProcessRunner("cpu", seconds=5)
    builder.start()
    runner.start()
    yield builder, runner
    builder.close()
    runner.close()


def outcome(machine, mod):
    """(seconds or None, reason or None) of a module."""
    builder, runner = machine
    (built,) = builder.build([BuilderInput(mod, LLVM)])
    if built.error_msg is not None:
        return None, str(built.error_msg)
    (future,) = runner.run([RunnerInput(str(built.artifact_path), "cpu", [])])
    result = future.result()
    return result.run_secs and float(result.run_secs[0]), result.error_msg and str(result.error_msg)


def candidate(function) -> tvm.IRModule:
    """A module that claims to be a schedule of `product()`."""
    return tvm.IRModule({"main": function.with_attrs({"global_symbol": "main", WORKLOAD: workload_name(product())})})


def scheduled() -> tvm.IRModule:
    schedule = Schedule(product())
    i, j, k = schedule.get_loops(schedule.get_sblock("c"))
    schedule.reorder(i, k, j)
    return candidate(schedule.mod["main"])


def test_the_default_schedule_is_timed(machine):
    seconds, reason = outcome(machine, product())
    assert reason is None and 0 < seconds < 0.1


def test_compiling_yields_to_the_search(machine):
    builder, _ = machine
    priority = builder.pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    assert priority == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)


def test_another_schedule_is_timed(machine):
    outcome(machine, product())
    seconds, reason = outcome(machine, scheduled())
    assert reason is None and 0 < seconds < 0.1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (wrong, "wrong numbers"),
        (crash, "crashed the process"),
        (hang, "took more than 5 s"),
        (uncompilable, "does not compile"),
    ],
)
def test_a_bad_candidate_fails_with_its_reason_and_the_next_is_timed(machine, make, why):
    outcome(machine, product())
    seconds, reason = outcome(machine, candidate(make()))
    assert seconds is None and why in reason
    seconds, reason = outcome(machine, scheduled())
    assert reason is None and seconds > 0


def test_an_attention_runs_with_its_mask(machine):
    problem = AttentionProblem(1, 2, 2, 40, 40, 16, 16, "float32", 0.25)
    task = attention_task(problem, masks.sliding_window(5), LLVM)
    keep_mask(machine[0].folder, task.digest, task.mask)
    for space in task.spaces:
        seconds, reason = outcome(machine, schedule_of(task, space, space.configs[0]).mod)
        assert reason is None and seconds > 0


def test_an_attention_under_another_mask_is_wrong(machine):
    """The kernel is the same for all masks; the operands that the runner gives it are not."""
    problem = AttentionProblem(1, 2, 2, 40, 40, 16, 16, "float32", 0.25)
    task = attention_task(problem, masks.causal(), LLVM)
    keep_mask(machine[0].folder, task.digest, BrokenMask())
    _, reason = outcome(machine, schedule_of(task, *task.default).mod)
    assert "wrong numbers" in reason


class BrokenMask:
    """Says one thing of its elements and another of its blocks."""

    def dense(self, q_len, kv_len):
        return masks.causal().dense(q_len, kv_len)

    def compile(self, *arguments):
        return masks.sliding_window(3).compile(*arguments)
