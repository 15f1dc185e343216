"""Runs inputs in a process that may crash or hang: both are findings, after which another process goes on."""

import collections
import json
import mmap
import os
import resource
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

SECONDS = 10  # an input that takes longer hangs
MEMORY = 2 << 30  # bytes that inputs may take together, beyond what is there at the start


class Hangs(BaseException):
    """Raised by a timer; no `except Exception` of what is tested stops it."""


@dataclass
class Summary:
    """Counts by (target, answer), and findings: (number of the input, target, what happened)."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)
    seconds: float = 0.0


def make_input(targets: Sequence, seed: int, number: int) -> tuple:
    """(target, files) of an input: a function of its arguments."""
    rng = Random(f"{seed} {number}")
    (target,) = rng.choices(targets, [target.weight for target in targets])
    return target, target.make(rng)


def run(targets: Sequence, inputs: int, seed: int, save: Path | None = None, progress=lambda done: None) -> Summary:
    """Check inputs 0 … inputs - 1 of a seed.  Those that find something are saved as folders of files in `save`."""
    started, summary, first = time.monotonic(), Summary(), 0
    make_input(targets, seed, 0)  # what all inputs are made from, once for all processes
    with tempfile.TemporaryDirectory(prefix="stof_fuzz_", dir=_fast_folder()) as scratch:
        while first < inputs:
            first = _run_in_a_process(targets, first, inputs, seed, Path(scratch), summary, progress)
    summary.seconds = time.monotonic() - started
    for number, _, what in summary.findings if save is not None else ():
        save_input(targets, seed, number, what, save)
    return summary


def save_input(targets: Sequence, seed: int, number: int, what: str, save: Path) -> None:
    target, files = make_input(targets, seed, number)
    folder = Path(save, f"{target.name}-{seed}-{number}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "finding.txt").write_text(what + "\n", errors="backslashreplace")


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run_in_a_process(targets, first, last, seed, scratch: Path, summary: Summary, progress) -> int:
    """Check some inputs and return the number of the first that was not."""
    at = mmap.mmap(-1, 8)  # the number of the input under way, shared
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            _check_all(targets, first, last, seed, scratch, at, told)  # does not return
        status = _wait(child, at, progress)
        number = struct.unpack("q", at[:])[0]
        told.seek(0)
        for line in told:
            kind, *what = json.loads(line)
            if kind == "count":
                summary.counts[what[0], what[1]] += what[2]
            else:
                summary.findings.append(tuple(what))
    if status == 0:
        return last
    target, _ = make_input(targets, seed, number)
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    summary.findings.append((number, target.name, f"the process died: {how}"))
    return number + 1


def _wait(child: int, at, progress) -> int:
    """The child's status; a child that does not go on is killed."""
    seen, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        number = struct.unpack("q", at[:])[0]
        progress(number)
        if number != seen:
            seen, since = number, time.monotonic()
        elif time.monotonic() - since > 6 * SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _check_all(targets, first, last, seed, scratch: Path, at, told) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads that PyTorch has started before
    counts = collections.Counter()

    def tell() -> None:
        for (target, answer), count in counts.items():
            print(json.dumps(["count", target, answer, count]), file=told)
        counts.clear()
        told.flush()

    warnings.simplefilter("ignore")  # of lines that were moved away
    _limit_memory()
    signal.signal(signal.SIGALRM, _hang)
    try:
        for number in range(first, last):
            at[:] = struct.pack("q", number)
            target, files = make_input(targets, seed, number)
            signal.alarm(SECONDS)
            try:
                counts[target.name, target.check(files, _emptied(scratch / target.name))] += 1
            except (Exception, Hangs):
                told.write(json.dumps(["finding", number, target.name, traceback.format_exc()[-3000:]]) + "\n")
            signal.alarm(0)
            if number % 64 == 0:
                tell()  # what is counted is not lost when the process dies
        tell()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _emptied(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _hang(*_):
    raise Hangs(f"more than {SECONDS} s")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
