"""Checks programs in processes that may crash or hang: each is forked, told one program at a time, and replaced."""

import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 90  # of processor time that a program may take, or ten times as long on the clock
CHECKS = 250  # of one process: what it leaves in memory is bounded


class Worker:
    """A process that applies `work` to what it is sent."""

    def __init__(self, work: Callable[[Any], Any]):
        self.connection, end = multiprocessing.Pipe()
        self.since, self.used, self.done, self.task = 0.0, 0.0, 0, None
        self.id = os.fork()
        if self.id == 0:
            self.connection.close()
            _serve(work, end)
        end.close()

    def send(self, task) -> None:
        self.task, self.since, self.used = task, time.monotonic(), self._seconds()
        self.connection.send(task)

    def answer(self):
        """What the work gave; EOFError if the process died of it."""
        self.done += 1
        return self.connection.recv()

    def hangs(self, seconds: float) -> bool:
        return self._seconds() - self.used > seconds or time.monotonic() - self.since > 10 * seconds

    def _seconds(self) -> float:
        """Seconds of the processor that the process has used."""
        try:
            fields = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        """End the process; its status, negative the signal that it died of before."""
        self.connection.close()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            done, status = os.waitpid(self.id, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self.id, signal.SIGKILL)
        os.waitpid(self.id, 0)
        return 0


def _serve(work, connection) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["STOF_CACHE_DIR"] = folder
            while True:
                connection.send(work(connection.recv()))
    except EOFError:
        os._exit(0)
    except BaseException:
        os._exit(1)


def run(
    work: Callable, tasks: Iterable, jobs: int, failed: Callable[[str], Any], seconds: float = SECONDS
) -> Iterator[tuple[Any, Any]]:
    """(task, result) of all tasks as they are done; of one that is lost, `failed("crash: …" or "hang")`."""
    waiting, workers = iter(tasks), []
    exhausted = False
    try:
        while True:
            while not exhausted and len(workers) < jobs:
                try:
                    task = next(waiting)
                except StopIteration:
                    exhausted = True
                    break
                workers.append(Worker(work))
                workers[-1].send(task)
            if not workers:
                return
            ready = multiprocessing.connection.wait([w.connection for w in workers], timeout=1.0)
            for worker in list(workers):
                if worker.connection in ready:
                    task = worker.task
                    try:
                        result = worker.answer()
                        gone = worker.done >= CHECKS
                    except (EOFError, ConnectionResetError):
                        workers.remove(worker)
                        result, gone = failed(f"crash: status {worker.end()}"), False
                        yield task, result
                        continue
                    yield task, result
                    following = next(waiting, None) if not exhausted and not gone else None
                    if following is None:
                        workers.remove(worker)
                        worker.end()
                    else:
                        worker.send(following)
                elif worker.hangs(seconds):
                    workers.remove(worker)
                    os.kill(worker.id, signal.SIGKILL)
                    worker.end()
                    yield worker.task, failed("hang")
    finally:
        for worker in workers:
            os.kill(worker.id, signal.SIGKILL)
            worker.end()
