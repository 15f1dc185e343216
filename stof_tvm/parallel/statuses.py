"""Short statuses that the ranks of a group send one another, beside the group's own exchanges.

A status is sent from each rank to each over gloo, also where the group is one of NCCL: so a rank whose connection
breaks is noticed at once.  Its latest one is also noted in the group's store, where a rank that waits for something
else finds it, and where it stays when the process that wrote it ends.
"""

import contextlib
import datetime
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tir_kernels.errors import InputError

STATUS_BYTES = 16384
HEARD_EACH = 0.01  # seconds between two looks for what others note


class Statuses:
    """The statuses of a group's ranks: dicts of JSON, each with the place "at" of a rank, which only grows.

    Parameters
    ----------
    group : ProcessGroup
    rank, count : int
        This process's number in the group, and how many there are.
    seconds : float
        How long a rank waits for the others to come.

    Raises RuntimeError, which names the ranks that did not, where one does not.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, count: int, seconds: float):
        self.rank, self.others = rank, [other for other in range(count) if other != rank]
        # Of the group's own name: names that dist.new_group makes count the groups of a process, which may be in more
        # of them than another.
        self._store: Any = dist.PrefixStore("stof_tvm", distributed_c10d._get_process_group_store(group))
        try:
            self._store.set(f"here/{rank}", "")
            self._gloo: Any = dist.ProcessGroupGloo(self._store, rank, count, datetime.timedelta(seconds=seconds))
        except Exception as error:  # of the store or of gloo
            raise RuntimeError(f"{self._who_did_not_come()}: {error}") from error
        self._sending: dict[int, list] = {other: [] for other in self.others}  # kept until they are received

    def _who_did_not_come(self) -> str:
        try:
            absent = [str(other) for other in self.others if not self._store.check([f"here/{other}"])]
        except Exception:  # of a store whose process is gone
            return "the process that holds the group's store, mostly rank 0's, is gone"
        return f"rank {' and '.join(absent)} did not come" if absent else "all came, and one is gone or was late"

    def close(self) -> None:
        """Let go of what a group has, when the group goes."""
        self._gloo = self._store = None
        self._sending.clear()

    def exchange(self, status: dict, seconds: float) -> list[dict | None]:
        """The status of every rank at this one's place or behind it, None for one that is gone or takes `seconds`.

        Statuses of earlier places are dropped: they are of calls that failed elsewhere.
        """
        self.note(status)
        end = time.monotonic() + seconds
        self._send(status)
        found: list[dict | None] = [None] * (1 + len(self.others))
        found[self.rank] = json.loads(_text(status))
        for other in self.others:
            try:
                found[other] = self._received(other, status["at"], end)
            except RuntimeError:  # gone or too late, or another one was, which ends all waiting
                note = self.notes(status["at"]).get(other)
                found[other] = note if note is not None and note["at"] >= status["at"] else None
        return found

    def tell(self, status: dict) -> None:
        """Send and note a status, and wait for nobody."""
        self.note(status)
        self._send(status)

    def note(self, status: dict) -> None:
        """Write a status where others find it; an error stays there when others follow."""
        with contextlib.suppress(Exception):  # the store's process may be gone
            if "error" in status:
                self._store.set(f"error/{self.rank}", _text(status))
            self._store.set(f"note/{self.rank}", _text(status))

    def notes(self, at: int) -> dict[int, dict]:
        """The latest error of each other rank, if it is of a place or behind it, else its latest note."""
        found = {}
        for other in self.others:
            error = self._noted("error", other)
            note = error if error is not None and error["at"] >= at else self._noted("note", other)
            if note is not None:
                found[other] = note
        return found

    def wait_for_notes(self, at: int, seconds: float) -> None:
        """Return when all others have noted something at a place or behind it, or after some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            notes = {other: self._noted("note", other) for other in self.others}
            if all(note is not None and note["at"] >= at for note in notes.values()):
                return
            time.sleep(HEARD_EACH)

    def _noted(self, kind: str, other: int) -> dict | None:
        key = f"{kind}/{other}"
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except Exception:  # of a store whose process is gone
            return None

    def _send(self, status: dict) -> None:
        data = _text(status).encode().ljust(STATUS_BYTES)
        if len(data) > STATUS_BYTES:
            raise InputError(f"a status of {len(data)} bytes is longer than {STATUS_BYTES}")
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for other in self.others:
            with contextlib.suppress(RuntimeError):  # gone
                self._sending[other].append(self._gloo.send([sent], other, 0))

    def _received(self, other: int, at: int, end: float) -> dict:
        """The next status of a rank that is not of an earlier place; RuntimeError where none comes until `end`."""
        received = torch.empty(STATUS_BYTES, dtype=torch.uint8)
        while True:
            self._gloo.recv([received], other, 0).wait(_until(end))
            status = json.loads(received.numpy().tobytes())
            if status["at"] >= at:
                break
        if "error" not in status and status["at"] == at:  # it is here, too, and reads in order what was sent to it
            with contextlib.suppress(RuntimeError):
                self._sending[other][-1].wait(_until(end))
            self._sending[other].clear()
        return status


def _until(end: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(end - time.monotonic(), 0.01))


def _text(status: dict) -> str:
    return json.dumps(status, ensure_ascii=False).encode(errors="replace").decode()
