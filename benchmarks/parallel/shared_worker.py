"""The processes that measure one system on all ranks, seen from one of the ranks that plan."""

import tempfile
from pathlib import Path

import torch.distributed as dist

from benchmarks.models.worker import NOT_READY, Worker
from benchmarks.parallel.cases import Case
from benchmarks.parallel.measure import SINGLE, get_ready


class SharedWorker:
    """One process on each rank, or on rank 0 alone; all ranks that plan take each step together, over gloo."""

    def __init__(self, case: Case, system: str, device: str, threads: int, verify: bool, log: str):
        self.case, self.system = case, system
        rank, count = dist.get_rank(), 1 if system in SINGLE else dist.get_world_size()
        self.folder = tempfile.TemporaryDirectory()
        (meeting,) = said_by_rank_0(str(Path(self.folder.name, "meeting")))
        arguments = case, system, rank, count, meeting, device, threads, verify
        self.worker = Worker(case, system, get_ready, arguments, log) if rank < count else None

    def is_ready(self, deadline: float) -> bool:
        """Whether the processes of all ranks wait for their turn, or have failed, before the deadline."""
        return all(said_by_all(self.worker is None or self.worker.is_ready(deadline)))

    def measure(self, deadline: float) -> dict:
        """Let all processes measure at once when they are ready; rank 0's fields of the row, or the first failure."""
        ready = self.is_ready(deadline)
        row = {"failed": NOT_READY}
        if ready:
            failed = self._first_failure()
            row = failed if failed is not None else self._measured(deadline)
        self.close()
        return row

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.folder.cleanup()

    def _first_failure(self) -> dict | None:
        own = None if self.worker is None else self.worker.row
        return next((row for row in said_by_all(own) if row is not None), None)

    def _measured(self, deadline: float) -> dict:
        rows = said_by_all({} if self.worker is None else self.worker.measure(deadline))
        return next((row for row in rows if "failed" in row), rows[0])


def said_by_all(value) -> list:
    """What each rank says."""
    said: list = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def said_by_rank_0(*values) -> list:
    said = list(values)
    dist.broadcast_object_list(said)
    return said
