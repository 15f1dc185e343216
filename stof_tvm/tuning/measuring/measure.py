"""Measures candidates with MetaSchedule's builder and runner, except those whose outcome the log has."""

import shutil
import statistics
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.arg_info import ArgInfo, TensorInfo
from tvm.s_tir.meta_schedule.builder import Builder, BuilderInput
from tvm.s_tir.meta_schedule.runner import Runner, RunnerInput

from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.logs.record import Record
from stof_tvm.tuning.measuring.builder import WORKLOAD, workload_name
from stof_tvm.tuning.measuring.quiet import Quiet
from stof_tvm.tuning.task import Task, choice_of
from tir_kernels.tuning.decisions import decisions_key, decisions_of
from tir_kernels.tuning.template_space import completed

ENTRY = "main"


@dataclass(frozen=True)
class Outcome:
    """A candidate's microseconds, or None and the reason; `is_cached` says that it comes from the log."""

    us: float | None
    reason: str = ""
    is_cached: bool = False


class Measurer:
    """Measures candidates in parallel, none of them twice.

    Parameters
    ----------
    builder, runner : Builder, Runner
        MetaSchedule's builder and runner.
    log : TuningLog
        Gets every outcome as soon as it is known.
    device : str
        "cuda" or "cpu".
    gpu : str
        The name of the device that measures; times of other devices in the log do not count.
    parallel : int
        Number of candidates under way at a time.
    use_cache : bool
        Whether the log's outcomes are used instead of measuring again.
    shares_cores : bool
        Whether measurements need the cores that compile, so that the two must take turns.

    Attributes
    ----------
    quiet : Quiet
        Other work on these cores goes into `quiet.work()`.
    """

    def __init__(
        self,
        builder: Builder,
        runner: Runner,
        log: TuningLog,
        device: str,
        gpu: str,
        parallel: int,
        use_cache: bool = True,
        shares_cores: bool = False,
    ):
        self.builder, self.runner, self.log = builder, runner, log
        self.device, self.gpu, self.parallel = device, gpu, parallel
        self.use_cache = use_cache
        self.waited = 0.0  # seconds
        self.threads = ThreadPoolExecutor(2 * parallel)  # threads that wait for processes and for the device
        self.lock, self.reference_lock = threading.Lock(), threading.Lock()
        self.known = {}  # key of a task -> decisions -> Future
        self.reference_errors = {}  # key of a task of MetaSchedule's rules -> why its default does not build, or None
        self.is_closed = False
        self.quiet = Quiet(shares_cores)

    def submit(self, task: Task, schedule: Schedule) -> Future:
        """A future of a candidate's Outcome; one that is known, or under way, is not measured again."""
        known = self._known(task)
        key = decisions_key(decisions_of(schedule.trace))
        if key not in known or not self.use_cache:
            known[key] = self.threads.submit(self._measure, task, schedule)
        return known[key]

    def wait(self, futures: list[Future]) -> list[Outcome]:
        """The outcomes, once all are there."""
        started = time.perf_counter()
        outcomes = [future.result() for future in futures]
        self.waited += time.perf_counter() - started
        return outcomes

    def has(self, task: Task, decisions: dict) -> bool:
        """Whether these decisions are known or under way."""
        return decisions_key(decisions) in self._known(task)

    def records(self, task: Task) -> list[Record]:
        """The log's records of a task on this device, with defaults for decisions that are newer than a record."""
        found = self.log.records(task.key) if self.use_cache else []
        return [replace(x, decisions=completed(x.decisions, task.templates)) for x in found if x.gpu == self.gpu]

    def close(self) -> None:
        """Abandon what is under way."""
        self.is_closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _known(self, task: Task) -> dict[str, Future]:
        if task.key not in self.known:
            self.known[task.key] = {}
            for record in self.records(task):
                future = Future()
                future.set_result(Outcome(record.us, record.reason, is_cached=True))
                self.known[task.key][decisions_key(record.decisions)] = future
        return self.known[task.key]

    def _measure(self, task: Task, schedule: Schedule) -> Outcome:
        outcome = self._build_and_run(task, schedule)
        with self.lock:
            if not self.is_closed:
                self.log.add(task.mod, schedule.trace, outcome.reason if outcome.us is None else outcome.us, self.gpu)
        return outcome

    def _build_and_run(self, task: Task, schedule: Schedule) -> Outcome:
        mod = schedule.mod
        with self.quiet.work():
            if not task.spaces:
                if (reason := self._build_reference(task)) is not None:
                    return Outcome(None, reason)
                if schedule.trace.insts:
                    mod = tvm.IRModule({ENTRY: mod[ENTRY].with_attr(WORKLOAD, workload_name(task.mod))})
            (built,) = self.builder.build([BuilderInput(mod, self.log.target)])
        if built.error_msg is not None:
            return Outcome(None, str(built.error_msg))
        library = str(built.artifact_path)
        with self.quiet.measurement():
            (future,) = self.runner.run(
                [RunnerInput(library, self.device, _arguments(task, schedule, self.log.target))]
            )
            result = future.result()
        if task.spaces or schedule.trace.insts:
            shutil.rmtree(Path(library).parent, ignore_errors=True)
        if result.run_secs is None:
            return Outcome(None, str(result.error_msg))
        seconds = [float(x) for x in result.run_secs]
        return Outcome(statistics.median(seconds) * 1e6)

    def _build_reference(self, task: Task) -> str | None:
        """Build the default schedule, whose results check the others; returns why it does not build, or None."""
        with self.reference_lock:
            if task.key not in self.reference_errors:
                (built,) = self.builder.build([BuilderInput(task.mod, self.log.target)])
                self.reference_errors[task.key] = None if built.error_msg is None else str(built.error_msg)
            return self.reference_errors[task.key]


def _arguments(task: Task, schedule: Schedule, target: tvm.target.Target) -> list[ArgInfo]:
    """The arguments of the built function: a template's kernel may take a workspace between inputs and outputs."""
    arguments = list(ArgInfo.from_entry_func(task.mod, remove_preproc=True))
    if task.problem is None or task.digest is not None:
        return arguments
    template, config = choice_of(task, schedule.trace)
    outputs = len(task.problem.outputs)
    workspace = [TensorInfo(dtype, shape) for shape, dtype in template.operands(task.problem, config, target).workspace]
    return [*arguments[:-outputs], *workspace, *arguments[-outputs:]]
