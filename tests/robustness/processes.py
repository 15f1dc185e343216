"""Processes that are forked off a test, which spares each the seconds of its imports."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from random import Random


class Process:
    """Runs `work(tell)` in a copy of this process; `told` is how often that called `tell()`."""

    def __init__(self, work: Callable[[Callable[[], None]], None]):
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        self.told = 0
        self.id = os.fork()
        if self.id == 0:
            status = 1
            try:
                work(lambda: os.write(end, b"."))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(end)

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        _, status = os.waitpid(self.id, 0)
        self.listen()
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(status)

    def listen(self) -> int:
        try:
            while heard := os.read(self._pipe, 1 << 16):
                self.told += len(heard)
        except BlockingIOError:
            pass
        return self.told

    def kill(self) -> None:
        os.kill(self.id, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL


def kill_at_random(work, rng: Random, longest: float, least_told: int = 0, patience: float = 60.0) -> int:
    """Run `work`, kill it some time after it has told what it must; how often it did tell."""
    process, deadline = Process(work), time.monotonic() + patience
    while process.listen() < least_told and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.random() * longest)
    process.kill()
    assert process.told >= least_told, f"nothing happened within {patience} s"
    return process.told
