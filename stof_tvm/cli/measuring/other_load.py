"""How much of the processors other processes keep busy while calls are timed: threads that wait for each other then
wait for these, and a time may be many times what it is on an idle machine."""

import os
import time
from pathlib import Path
from types import TracebackType

STAT = Path("/proc/stat")
IDLE = 3, 4  # fields of its first line: idle, and waiting for a disk
SPARE = 0.25  # cores; less than this is what any machine does


class OtherLoad:
    """A context in which the load of other processes is measured.

    Attributes
    ----------
    cores : float or None
        How many processors they kept busy, on average; None where the system does not tell.
    """

    cores: float | None = None

    def __enter__(self) -> "OtherLoad":
        self._busy, self._own, self._wall = _busy_seconds(), _own_seconds(), time.perf_counter()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        busy, wall = _busy_seconds(), time.perf_counter() - self._wall
        if busy is not None and self._busy is not None and wall > 0:
            others = busy - self._busy - (_own_seconds() - self._own)
            self.cores = round(max(0.0, others) / wall, 2)

    def note(self, threads: int) -> str | None:
        """What makes times of calls with so many threads worthless, in a sentence; None where nothing is known to."""
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.cores is None or self.cores <= SPARE or self.cores + threads <= available + SPARE:
            return None
        return (
            f"other processes kept {self.cores:.1f} of {os.cpu_count()} cores busy: threads of PyTorch and of the "
            "engine waited for them, and the times and their ratio say little. Measure on an idle machine; "
            "OMP_WAIT_POLICY=passive makes PyTorch suffer less"
        )


def _busy_seconds() -> float | None:
    """Seconds that all processors have worked since the machine started; None where the system does not tell."""
    try:
        first = STAT.read_text().partition("\n")[0].split()
        counts = [int(field) for field in first[1:9]]  # what guests use is in the first fields already
        return (sum(counts) - sum(counts[field] for field in IDLE)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
