"""Forks of the process that work beside each other, a few at a time: each writes files and ends.

A fork has everything that the process holds, and copies none of it: memory is copied where one of the two writes.  It
has none of the process's threads, so it computes with one, and it must not use a GPU that the process uses.
"""

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import cast

from tir_kernels.compiling.cpu_threads import use_own_thread
from tir_kernels.compiling.forked import end_at_once

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of processors in a period, and the period
SET_DEATH_SIGNAL = 1  # prctl(2): the signal for a child whose parent has died


def cores() -> int:
    """How many processors this process may use, by its affinity and its container's quota; 1 where it cannot fork."""
    if not hasattr(os, "fork"):
        return 1
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # there is none: "max"
        return count


class Forks:
    """A fork for each piece of work, started in order, at most `most` of them at a time.

    A context: what is unfinished when it is left is killed, and nothing is left behind.  The forks end with the
    process, too, however that ends.

    Parameters
    ----------
    works : sequence of callables
        What each fork does.  It should catch its exceptions: only the status of a fork comes back.
    most : int
    """

    def __init__(self, works: Sequence[Callable[[], None]], most: int):
        self._works = works
        self._most = most
        self._started = 0
        self._running: dict[int, tuple[int, int]] = {}  # what reads from a fork -> (its process, number of the work)

    def __enter__(self) -> "Forks":
        self._fill()
        return self

    def __exit__(self, *_exception) -> None:
        for process, _ in self._running.values():
            os.killpg(process, signal.SIGKILL)  # with the compilers that it has started
        for reader in list(self._running):
            self._end(reader)

    def ended(self, most: int | None = None) -> Iterator[tuple[int, int]]:
        """(number of the work, exit status of its fork) as they end; a negative status is the signal that ended it.

        `most` is how many may run from now on.  Where the system starts no more, the rest of the work is left.
        """
        self._most = most or self._most
        self._fill()
        while self._running:
            for reader in wait(list(self._running)):
                yield self._end(cast(int, reader))
                self._fill()

    def _fill(self) -> None:
        while len(self._running) < self._most and self._started < len(self._works):
            if not self._start(self._started):
                return
            self._started += 1

    def _start(self, number: int) -> bool:
        """Start a fork; False where the system has no room for one."""
        parent = os.getpid()
        reader, writer = os.pipe()  # ends with the fork
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for a process with threads
                process = os.fork()
        except OSError:
            os.close(reader)
            return False
        finally:
            if os.getpid() == parent:
                os.close(writer)
        if process == 0:
            _work(self._works[number], parent)
        _make_group(process)
        self._running[reader] = process, number
        return True

    def _end(self, reader: int) -> tuple[int, int]:
        process, number = self._running.pop(reader)
        os.close(reader)
        _, status = os.waitpid(process, 0)
        return number, os.waitstatus_to_exitcode(status)


def _make_group(process: int) -> None:
    """Make a process the first of a group: both it and its parent do so, since either may come first."""
    try:
        os.setpgid(process, process)
    except (PermissionError, ProcessLookupError):  # it has done so, and runs or has ended
        pass


def _work(work: Callable[[], None], parent: int) -> None:
    """What a fork does; it does not return."""
    status = 1
    try:
        _make_group(os.getpid())
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:  # else it died before it could be told to send a signal
            end_at_once()
            gc.freeze()  # else each collection would look through, and copy, all that the process holds
            use_own_thread()
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)
            work()
            status = 0
    finally:
        os._exit(status)
