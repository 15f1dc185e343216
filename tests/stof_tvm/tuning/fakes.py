"""Devices that measure nothing: the time of a candidate is a function of its decisions."""

from concurrent.futures import Future

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from stof_tvm.tuning.measuring.measure import Outcome
from stof_tvm.tuning.measuring.quiet import Quiet
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.tuning.decisions import decisions_key, decisions_of

CUDA = parse_target("cuda -arch=sm_80")
GEMM = GemmProblem(128, 768, "float16", (Step("add", "row"), Step("gelu")), k=256)
ROWS = RowProblem(128, 768, "float16", (Step("add", "matrix"),), Norm("layer_norm", 1e-5))


def made_up_us(decisions: dict) -> float:
    """Smooth in the decisions, with one best place that is not the default."""
    us = 20.0
    for name, value in decisions.items():
        if name != "template":
            us += abs(int(value) - {"stages": 4, "block_m": 32}.get(name, 2)) ** 0.5
    return us


class FakeMeasurer:
    """As `Measurer`; `us` gives a time, None for a failure."""

    gpu, parallel, waited = "a fake", 4, 0.0
    quiet = Quiet(False)

    def __init__(self, us=made_up_us, log=None):
        self.us, self.log = us, log
        self.measured = []

    def submit(self, task, schedule) -> Future:
        decisions = decisions_of(schedule.trace)
        self.measured.append((task.key, decisions_key(decisions)))
        us = self.us(decisions)
        future = Future()
        future.set_result(Outcome(us, "" if us is not None else "made up"))
        return future

    def wait(self, futures):
        return [future.result() for future in futures]

    def has(self, task, decisions) -> bool:
        return (task.key, decisions_key(decisions)) in self.measured

    def records(self, task) -> list:
        return []


@derived_object
class FakeBuilder(PyBuilder):
    """Counts; fails where the reason is given."""

    def __init__(self, reason: str | None = None):
        self.reason, self.built = reason, []

    @property
    def count(self) -> int:
        return len(self.built)

    def build(self, build_inputs):
        self.built += list(build_inputs)  # at once, as several threads call: extending by an iterable may lose others'
        return [BuilderResult(None if self.reason else "/nowhere/at/all/kernel.so", self.reason) for _ in build_inputs]


@derived_object
class FakeRunner(PyRunner):
    """Every candidate takes `us`, or fails for `reason`."""

    def __init__(self, us: float = 7.0, reason: str | None = None):
        self.result = RunnerResult(None if reason else [us / 1e6], reason)

    def run(self, runner_inputs):
        return [FakePending(self.result) for _ in runner_inputs]


@derived_object
class FakePending(PyRunnerFuture):
    def __init__(self, value):
        self.value = value

    def done(self):
        return True

    def result(self):
        return self.value
