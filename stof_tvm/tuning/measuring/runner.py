"""A MetaSchedule runner that measures in one process, which owns the device and is replaced if it dies."""

from concurrent.futures import Future, ThreadPoolExecutor

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerFuture, RunnerInput, RunnerResult
from tvm.support.popen_pool import PopenWorker

from stof_tvm.tuning.measuring import run_worker
from stof_tvm.tuning.measuring.job import short_reason
from stof_tvm.tuning.measuring.process import end_process, start_process

RUN_SECONDS = 20  # limit for a candidate; the first one of a problem also computes the reference


@derived_object
class ProcessRunner(PyRunner):
    """Checks and times libraries of a `PoolBuilder`, one after the other.

    A candidate that crashes, hangs or gives wrong numbers has a result without times, with the reason.

    Parameters
    ----------
    device : str
        "cuda" or "cpu".
    seed : int
        The seed of the random inputs.
    seconds : float
        The time after which a candidate counts as hanging.
    templates : tuple
        The user's own templates.
    """

    def __init__(self, device: str, seed: int = 0, seconds: float = RUN_SECONDS, templates: tuple = ()):
        self.device, self.seed, self.seconds = device, seed, seconds
        self.worker = PopenWorker(exec, (f"{start_process(templates)}\nimport {run_worker.__name__}",))
        self.thread = ThreadPoolExecutor(1)

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self.thread.submit(self._send, abs, 0)

    def run(self, runner_inputs: list[RunnerInput]) -> list[RunnerFuture]:
        return [Pending(self.thread.submit(self._measure, str(x.artifact_path))) for x in runner_inputs]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        end_process(self.worker)

    def _measure(self, library: str) -> RunnerResult:
        try:
            us, reason = self._send(run_worker.measure, library, self.device, self.seed)
        except TimeoutError:
            return RunnerResult(None, f"it took more than {self.seconds} s")
        except ChildProcessError:
            return RunnerResult(None, "it crashed the process")
        except Exception as error:
            # A CUDA error persists: this process could measure nothing more.
            self.worker.kill()
            return RunnerResult(None, f"it failed: {short_reason(error)}")
        return RunnerResult(None if us is None else [us / 1e6], reason)

    def _send(self, function, *arguments):
        self.worker.send(function, arguments, timeout=self.seconds)
        return self.worker.recv()


@derived_object
class Pending(PyRunnerFuture):
    """A result that may not be there yet."""

    def __init__(self, future: Future):
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> RunnerResult:
        return self.future.result()
