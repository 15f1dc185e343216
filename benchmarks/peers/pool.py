"""Worker processes: they compile in parallel, then time one at a time, so that ratios are of neighbours in time."""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.peers.cases import Case

ROOT = Path(__file__).parents[2]
PREPARE_TIMEOUT_S = 180.0
TIME_TIMEOUT_S = 90.0
MAX_LOSSES = 8  # workers of one group, after which its environment counts as broken

Work = tuple[Case, tuple[str, ...]]


class WorkerLost(Exception):
    """A worker process ended, or had to be ended; `blame` says whether the system at hand is at fault."""

    def __init__(self, reason: str, blame: bool = True):
        super().__init__(reason)
        self.blame = blame


class WorkerProcess:
    """A `gpu_attention.py --worker` process and this end of its connection."""

    def __init__(self, device: str, python_path: list[str] | None, log):
        self.connection, theirs = Pipe()
        # Libraries first in the path where given; then nothing of the caller's, which may hold another tvm_ffi.
        path = [*python_path, str(ROOT)] if python_path else [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the parallelism is in the processes
            "OMP_NUM_THREADS": "2",
        }
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_attention.py"), "--device", device]
        command += ["--worker", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        theirs.close()

    def send(self, command: str, work: Work) -> None:
        with contextlib.suppress(OSError):  # that it is gone shows when its answers are awaited
            self.connection.send((command, *work))

    def answers(self, timeout: float) -> Iterable[tuple]:
        """What the worker sends until its command is done; WorkerLost where it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while True:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerLost(f"took longer than {timeout:.0f} s")
            try:
                kind, content = self.connection.recv()
            except (EOFError, OSError):
                raise WorkerLost(self._ending()) from None
            if kind == "broken":
                raise WorkerLost("its CUDA context is unusable", blame=False)
            if kind == "done":
                return
            yield kind, content

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def _ending(self) -> str:
        try:
            return f"its process ended with status {self.process.wait(timeout=10)}"
        except subprocess.TimeoutExpired:
            return "its process closed the connection"


@dataclass
class Group:
    """The workers of one environment: `size` processes that get `python_path` first (None: the caller's path)."""

    size: int
    python_path: list[str] | None = None


class Pool:
    """All groups' workers, started when first needed and replaced when lost."""

    def __init__(self, groups: dict[str, Group], device: str, log):
        self.groups, self.device, self.log = groups, device, log
        self.alive: dict[str, list[WorkerProcess]] = {name: [] for name in groups}
        self.owner: dict[tuple[str, Case], WorkerProcess] = {}
        self.losses: Counter[str] = Counter()

    def prepare(self, work: dict[str, list[Work]], deadline: float) -> None:
        """Compile every group's work in parallel, until done or `deadline` (time.monotonic)."""
        queues = {name: deque(items) for name, items in work.items()}
        busy: dict[WorkerProcess, tuple[str, Work, float]] = {}
        idle = [
            (name, self._start(name))
            for name, queue in queues.items()
            for _ in range(min(self.groups[name].size, len(queue)))
        ]
        while True:
            for name, worker in idle:
                if queues[name] and time.monotonic() < deadline:
                    item = queues[name].popleft()
                    worker.send("prepare", item)
                    busy[worker] = name, item, time.monotonic() + PREPARE_TIMEOUT_S
            if not busy:
                return
            idle = []
            ready = wait([worker.connection for worker in busy], timeout=1.0)
            for worker, (name, item, limit) in list(busy.items()):
                if worker.connection not in ready and time.monotonic() < limit:
                    continue
                del busy[worker]
                try:
                    list(worker.answers(timeout=0.5))
                    self.owner[name, item[0]] = worker
                    idle.append((name, worker))
                except WorkerLost as loss:
                    # Whatever it had prepared is prepared again by whoever times it.
                    print(f"a worker was lost while preparing {item[0].label}: {loss}", file=self.log, flush=True)
                    self._lose(name, worker)
                    if self.losses[name] < MAX_LOSSES:
                        idle.append((name, self._start(name)))

    def has_prepared(self, name: str, case: Case) -> bool:
        return (name, case) in self.owner

    def time(self, name: str, work: Work, take: Callable[[dict], None]) -> None:
        """Time the systems of one case, handing each row to `take`; one that ends its process gets a failed one."""
        case, left = work[0], list(work[1])
        while left:
            if self.losses[name] >= MAX_LOSSES:
                for system in left:
                    take(_failed(case, system, f"{MAX_LOSSES} worker processes were lost before"))
                return
            worker = self._worker_for(name, case)
            try:
                worker.send("time", (case, tuple(left)))
                for _, row in worker.answers(TIME_TIMEOUT_S):
                    left.remove(row["system"])
                    take(row)
                return
            except WorkerLost as loss:
                self._lose(name, worker)
                if loss.blame and left:
                    take(_failed(case, left.pop(0), str(loss)))

    def kernels(self, name: str, work: Work) -> dict[str, list[str]]:
        """The GPU kernels that each system launches; empty where profiling fails."""
        worker = self._worker_for(name, work[0])
        try:
            worker.send("kernels", work)
            return {s: names for _, found in worker.answers(TIME_TIMEOUT_S) for s, names in found.items()}
        except WorkerLost:
            self._lose(name, worker)
            return {}

    def close(self) -> None:
        for workers in self.alive.values():
            for worker in workers:
                worker.end()

    def _start(self, name: str) -> WorkerProcess:
        worker = WorkerProcess(self.device, self.groups[name].python_path, self.log)
        self.alive[name].append(worker)
        return worker

    def _worker_for(self, name: str, case: Case) -> WorkerProcess:
        owner = self.owner.get((name, case))
        return owner or (self.alive[name][0] if self.alive[name] else self._start(name))

    def _lose(self, name: str, worker: WorkerProcess) -> None:
        worker.end()
        self.losses[name] += 1
        self.alive[name].remove(worker)
        self.owner = {key: owner for key, owner in self.owner.items() if owner is not worker}


def _failed(case: Case, system: str, reason: str) -> dict:
    return {"case": case.to_json(None), "system": system, "failed": reason}
